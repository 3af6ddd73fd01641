/* What makes a logit, and an exponent of 2, of a product of query and key: shared by host and
 * device. Of capped scores it is the cap, and tanh is what is multiplied. */
#ifndef FA3_SOFTMAX_SCALE_H
#define FA3_SOFTMAX_SCALE_H

typedef struct {
  float natural; /* times a product: a logit; positive, or zero */
  float log2;    /* times a product: an exponent of 2; positive */
  float inverse; /* 1 / log2 */
  float limit;   /* of products: beyond it exponents are too large for their rounding */
  float none;    /* below all products: of a row that has seen no key. Finite, times log2 too */
} fa3_softmax_scale;

#endif
