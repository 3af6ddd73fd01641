#include "bench_plot.h"

#include <stdio.h>
#include <stdlib.h>

#include "failure.h"

enum { WIDTH = 760, LEFT = 250, RIGHT = 90, TOP = 50, STEP = 22, BAR = 16 };

/* What the title has of a processor's name may mean something in XML. */
static void write_text(FILE *svg, const char *text) {
  for (; *text; text++) {
    if (*text == '&' || *text == '<' || *text == '>')
      (void)fprintf(svg, "&#%d;", *text);
    else
      (void)fputc(*text, svg);
  }
}

int bench_plot_write(const struct output_file *file, const char *title,
                     const struct bench_bar *bars, size_t count) {
  char *text = NULL;
  size_t size = 0;
  double most = 0;
  FILE *svg = open_memstream(&text, &size);
  if (!svg) return fail(EXIT_FAILED, "%s: no memory for it", file->path);
  for (size_t i = 0; i < count; i++)
    if (bars[i].tflops > most) most = bars[i].tflops;
  (void)fprintf(svg,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%zu\" "
                "font-family=\"sans-serif\" font-size=\"13\">\n"
                "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
                "<text x=\"16\" y=\"28\" font-size=\"15\">",
                WIDTH, TOP + count * STEP + 16);
  write_text(svg, title);
  (void)fprintf(svg, "</text>\n");
  for (size_t i = 0; i < count; i++) {
    const size_t y = TOP + i * STEP;
    const double width = most > 0 ? (WIDTH - LEFT - RIGHT) * bars[i].tflops / most : 0;
    (void)fprintf(svg,
                  "<text x=\"%d\" y=\"%zu\" text-anchor=\"end\">%s</text>"
                  "<rect x=\"%d\" y=\"%zu\" width=\"%.1f\" height=\"%d\" fill=\"#4878a8\"/>"
                  "<text x=\"%.1f\" y=\"%zu\">%.3g</text>\n",
                  LEFT - 8, y + BAR - 3, bars[i].label, LEFT, y, width, BAR, LEFT + width + 6,
                  y + BAR - 3, bars[i].tflops);
  }
  (void)fprintf(svg, "</svg>\n");
  int code = fclose(svg) ? fail(EXIT_FAILED, "%s: no memory for it", file->path) : 0;
  if (!code) code = output_file_write(file, text, size);
  free(text);
  return code;
}
