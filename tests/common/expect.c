#include "expect.h"

#include <stdlib.h>
#include <string.h>

#include "test.h"

void expect_refused(fa3_status got, fa3_status status, const char *text) {
  if (got != status || !strstr(fa3_last_error(), text))
    fail_msg("%s (%s): expected %s with \"%s\"", fa3_status_name(got), fa3_last_error(),
             fa3_status_name(status), text);
}

void expect_forward(fa3_forward_args args) {
  if (fa3_forward_workspace(&args, &args.workspace_size)) fail_msg("%s", fa3_last_error());
  args.workspace = malloc(args.workspace_size + 1);
  assert_non_null(args.workspace);
  if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
  free(args.workspace);
}
