/* A producer fills a ring of buffers and a consumer empties them; barriers are all that they have
 * in common. Time goes in steps: a load takes 3 of them, a use 2. ring BUFFERS    1 to 4 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { most_stages = 4, tiles = 5, load_time = 3, use_time = 2 };

/* A barrier is the number of phases that it has completed. */
struct barrier {
  int completed;
};

/* As mbarrier.try_wait.parity: whether the phase of this parity is over. Before the first phase
 * ends, the one "before" it, of parity 1, counts as over. */
static bool is_over(const struct barrier *barrier, int parity) {
  return barrier->completed % 2 != parity;
}

int main(int count, char **arguments) {
  const int stages = count == 2 ? atoi(arguments[1]) : 0;
  if (stages < 1 || stages > most_stages) return 2;
  struct barrier full[most_stages] = {{0}}, empty[most_stages] = {{0}};
  int asked = 0, used = 0, arrives_at[most_stages] = {0}, busy_until = 0;
  bool using = false;
  printf("time  producer          consumer\n");
  for (int now = 0; used < tiles; now++) {
    char loads[32] = "", uses[32] = "waits";
    for (int i = 0; i < stages; i++)
      if (arrives_at[i] && arrives_at[i] == now) {
        full[i].completed++;
        arrives_at[i] = 0;
      }
    if (using && busy_until == now) {
      empty[used++ % stages].completed++;
      using = false;
    }
    if (asked < tiles) {
      const int stage = asked % stages, parity = asked / stages % 2;
      if (is_over(&empty[stage], parity ^ 1)) {
        snprintf(loads, sizeof loads, "asks for tile %d", asked);
        arrives_at[stage] = now + load_time;
        asked++;
      } else
        snprintf(loads, sizeof loads, "waits: buffer %d", stage);
    }
    if (!using && used < tiles && is_over(&full[used % stages], used / stages % 2)) {
      using = true;
      busy_until = now + use_time;
    }
    if (using) snprintf(uses, sizeof uses, "uses tile %d", used);
    if (used == tiles) snprintf(uses, sizeof uses, "done");
    printf("%4d  %-16s  %s\n", now, loads, uses);
  }
  return 0;
}
