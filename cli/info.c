/* fa3 info: what there is to compute with. */
#include <argp.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <yyjson.h>

#include "commands.h"
#include "device.h"
#include "dtype.h"
#include "failure.h"
#include "input_file.h"
#include "json.h"
#include "path.h"
#include "safetensors.h"

enum { KEY_JSON = 0x500 };

struct info_options {
  bool json;
  const char *file; /* null: the machine */
};

static const struct argp_option options[] = {{.name = "json", .key = KEY_JSON, .doc = "Print JSON"},
                                             {0}};

/* argp's type. NOLINTNEXTLINE(readability-non-const-parameter) */
static error_t parse(int key, char *arg, struct argp_state *state) {
  struct info_options *info = state->input;
  if (key == KEY_JSON) {
    info->json = true;
    return 0;
  }
  if (key != ARGP_KEY_ARG) return ARGP_ERR_UNKNOWN;
  if (info->file) argp_error(state, "%s: expected one file", arg);
  if (!path_has_suffix(arg, ".safetensors"))
    argp_error(state, "%s: expected a .safetensors file", arg);
  info->file = arg;
  return 0;
}

static const fa3_device_type device_types[] = {FA3_CPU, FA3_CUDA};
enum { DEVICE_TYPES = sizeof device_types / sizeof device_types[0] };

static void print_device(fa3_device device) {
  char name[32];
  fa3_device_info info = {.struct_size = sizeof info};
  bool usable = fa3_prepare(device) == FA3_OK;
  if (!usable) printf("%-8s can't be used: %s\n", device_name(device, name), fa3_last_error());
  if (fa3_get_device_info(device, &info) || (!usable && !*info.level)) return;
  printf("%-8s %s: %s, %" PRId32 " %s, %.1f GiB\n", usable ? device_name(device, name) : "",
         info.level, info.name, info.units, device.type == FA3_CPU ? "threads" : "SMs",
         (double)info.memory_bytes / (1 << 30));
}

static void print_devices(void) {
  for (int t = 0; t < DEVICE_TYPES; t++) {
    int32_t count = fa3_device_count(device_types[t]);
    for (int32_t i = 0; i < count; i++) print_device((fa3_device){device_types[t], i});
    fa3_device first = {device_types[t], 0};
    if (count == 0 && fa3_prepare(first)) printf("cuda     none: %s\n", fa3_last_error());
  }
}

static const char *phase_name(fa3_phase phase) {
  return phase == FA3_FORWARD ? "forward" : phase == FA3_BACKWARD ? "backward" : "?";
}

static int print_kernels(void) {
  printf("\n%-6s %-8s %-5s %8s %14s  %-8s  %s\n", "engine", "phase", "dtype", "head_dim",
         "value_head_dim", "here", "kernel");
  for (int32_t i = 0; i < fa3_kernel_count(); i++) {
    fa3_kernel_info kernel = {.struct_size = sizeof kernel};
    if (fa3_get_kernel_info(i, &kernel)) return fail(EXIT_FAILED, "%s", fa3_last_error());
    printf("%-6s %-8s %-5s %8" PRId32 " %14" PRId32 "  %-8s  %s\n", kernel.engine,
           phase_name(kernel.phase), dtype_name(kernel.dtype), kernel.head_dim,
           kernel.value_head_dim,
           kernel.selected ? "selected"
           : kernel.usable ? "usable"
                           : "-",
           kernel.name);
  }
  return 0;
}

static void add_device(yyjson_mut_doc *document, yyjson_mut_val *devices, fa3_device device,
                       int32_t count) {
  char name[32];
  fa3_device_info info = {.struct_size = sizeof info};
  yyjson_mut_val *entry = yyjson_mut_arr_add_obj(document, devices);
  fa3_status status = fa3_prepare(device);
  yyjson_mut_obj_add_strcpy(document, entry, "device", device_name(device, name));
  yyjson_mut_obj_add_bool(document, entry, "usable", status == FA3_OK);
  yyjson_mut_obj_add_str(document, entry, "status", fa3_status_name(status));
  if (status) yyjson_mut_obj_add_strcpy(document, entry, "reason", fa3_last_error());
  if (device.index >= count || fa3_get_device_info(device, &info)) return;
  yyjson_mut_obj_add_strcpy(document, entry, "name", info.name);
  yyjson_mut_obj_add_strcpy(document, entry, "level", info.level);
  yyjson_mut_obj_add_int(document, entry, "units", info.units);
  yyjson_mut_obj_add_uint(document, entry, "memory_bytes", info.memory_bytes);
}

static void add_devices(yyjson_mut_doc *document, yyjson_mut_val *root) {
  yyjson_mut_val *devices = yyjson_mut_obj_add_arr(document, root, "devices");
  for (int t = 0; t < DEVICE_TYPES; t++) {
    int32_t count = fa3_device_count(device_types[t]);
    for (int32_t i = 0; i < count || i == 0; i++)
      add_device(document, devices, (fa3_device){device_types[t], i}, count);
  }
}

static void add_kernels(yyjson_mut_doc *document, yyjson_mut_val *root) {
  yyjson_mut_val *kernels = yyjson_mut_obj_add_arr(document, root, "kernels");
  for (int32_t i = 0; i < fa3_kernel_count(); i++) {
    fa3_kernel_info kernel = {.struct_size = sizeof kernel};
    if (fa3_get_kernel_info(i, &kernel)) continue;
    yyjson_mut_val *entry = yyjson_mut_arr_add_obj(document, kernels);
    yyjson_mut_obj_add_strcpy(document, entry, "engine", kernel.engine);
    yyjson_mut_obj_add_strcpy(document, entry, "name", kernel.name);
    yyjson_mut_obj_add_str(document, entry, "phase", phase_name(kernel.phase));
    yyjson_mut_obj_add_str(document, entry, "dtype", dtype_name(kernel.dtype));
    yyjson_mut_obj_add_int(document, entry, "head_dim", kernel.head_dim);
    yyjson_mut_obj_add_int(document, entry, "value_head_dim", kernel.value_head_dim);
    yyjson_mut_obj_add_bool(document, entry, "usable", kernel.usable);
    yyjson_mut_obj_add_bool(document, entry, "selected", kernel.selected);
  }
}

static int print_json(void) {
  yyjson_mut_doc *document;
  yyjson_mut_val *root = json_begin(&document);
  yyjson_mut_obj_add_str(document, root, "version", fa3_version());
  add_devices(document, root);
  add_kernels(document, root);
  return json_print(document);
}

/* Names come from the file: what would move the cursor is shown as '?'. */
static void print_name(const char *name) {
  for (; *name; name++) (void)putchar((unsigned char)*name < 0x20 || *name == 0x7f ? '?' : *name);
}

static void print_stored(void *context, const char *name, const struct stored_tensor *tensor) {
  (void)context;
  printf("%-5s (", tensor->dtype_name);
  const int shown = tensor->rank < STORED_MAX_RANK ? tensor->rank : STORED_MAX_RANK;
  for (int d = 0; d < shown; d++) printf("%s%" PRId64, d ? ", " : "", tensor->shape[d]);
  printf("%s)  ", tensor->rank > STORED_MAX_RANK ? ", ..." : "");
  print_name(name);
  (void)putchar('\n');
}

/* The root of a JSON document, or its tensors. */
struct tree {
  yyjson_mut_doc *document;
  yyjson_mut_val *tensors;
};

static void add_stored(void *context, const char *name, const struct stored_tensor *tensor) {
  const struct tree *tree = context;
  yyjson_mut_val *entry = yyjson_mut_arr_add_obj(tree->document, tree->tensors);
  const int shown = tensor->rank < STORED_MAX_RANK ? tensor->rank : STORED_MAX_RANK;
  yyjson_mut_obj_add_strcpy(tree->document, entry, "name", name);
  yyjson_mut_obj_add_strcpy(tree->document, entry, "dtype", tensor->dtype_name);
  yyjson_mut_obj_add_int(tree->document, entry, "rank", tensor->rank);
  yyjson_mut_obj_add_val(tree->document, entry, "shape",
                         yyjson_mut_arr_with_sint64(tree->document, tensor->shape, (size_t)shown));
}

static int list_file(const struct info_options *info) {
  struct input_file file;
  TRY(input_file_open(info->file, &file));
  struct tree tree;
  yyjson_mut_val *root = json_begin(&tree.document);
  tree.tensors = yyjson_mut_obj_add_arr(tree.document, root, "tensors");
  int code = safetensors_list(&file, info->json ? add_stored : print_stored, &tree);
  input_file_close(&file);
  if (!code && info->json) return json_print(tree.document);
  yyjson_mut_doc_free(tree.document);
  return code;
}

int command_info(int argc, char **argv) {
  static const struct argp argp = {options,
                                   parse,
                                   "[FILE.safetensors]",
                                   "Show the version, the devices, or why there is none, and the "
                                   "compiled kernels, with - for those of no use here; "
                                   "or the tensors that a file holds",
                                   NULL,
                                   NULL,
                                   NULL};
  struct info_options info = {0};
  if (argp_parse(&argp, argc, argv, 0, NULL, &info)) return fail(EXIT_USAGE, "%m");
  if (info.file) return list_file(&info);
  if (info.json) return print_json();
  printf("fa3 %s\n\n", fa3_version());
  print_devices();
  return print_kernels();
}
