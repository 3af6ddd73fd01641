/* What many tests ask of a call. */
#ifndef FA3_TESTS_EXPECT_H
#define FA3_TESTS_EXPECT_H

#include "fa3.h"

/* Fails the test unless that is what the call gave, with the text in its message. */
void expect_refused(fa3_status got, fa3_status status, const char *text);

/* Calls fa3_forward with a workspace of the size that it asks for; it must succeed. */
void expect_forward(fa3_forward_args args);

/* A contiguous matrix. */
static inline fa3_tensor make_matrix(void *data, fa3_dtype dtype, int64_t rows, int64_t columns) {
  return (fa3_tensor){
      .data = data, .dtype = dtype, .rank = 2, .shape = {rows, columns}, .strides = {columns, 1}};
}

#endif
