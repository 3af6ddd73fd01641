/* The GPU that the program computes on: its memory and its clock, through the CUDA driver API,
 * which is found at run time. One GPU at a time. */
#ifndef FA3_CLI_CUDA_H
#define FA3_CLI_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* Makes GPU `index`, one that fa3_prepare accepts, the one that everything below is about. */
int cuda_open(int32_t index);
/* Its memory is given back; nothing happens if none is open. */
void cuda_close(void);

/* `what` it is for, in the message if it does not fit. */
int cuda_allocate(size_t size, const char *what, void **memory);
void cuda_free(void *memory);
int cuda_upload(void *to, const void *from, size_t size);
int cuda_download(void *to, const void *from, size_t size);

/* Waits for the work that was queued: how it fails shows only here. */
int cuda_wait(void);

/* Seconds on the GPU between the start and the end of what `queue` queues. */
int cuda_time(int (*queue)(void *context), void *context, double *seconds);

#endif
