/* For the page, which has one thread: what level.c asks of pthread.h. */
#ifndef FA3_TOYS_PTHREAD_H
#define FA3_TOYS_PTHREAD_H

typedef int pthread_once_t;
#define PTHREAD_ONCE_INIT 0

int pthread_once(pthread_once_t *once, void (*routine)(void));

#endif
