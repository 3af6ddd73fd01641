/* libfa3: FlashAttention-3 as a C library.
 *
 *   output = softmax(scale * query * key^T + mask) * value
 *
 * exactly, tile by tile with the online softmax, never storing the
 * seqlen_q x seqlen_k matrix (FlashAttention, arXiv 2205.14135; FlashAttention-2,
 * arXiv 2307.08691; FlashAttention-3, arXiv 2407.08608).
 *
 * The calls, in this order below, each with a struct of its arguments:
 *
 *   fa3_forward    attention, also of few queries against a cache (decoding)
 *   fa3_backward   its gradients
 *   fa3_append     new keys and values go into a cache; fa3_append_forward attends to them in the
 *                  same call
 *   fa3_combine    attention to several sets of keys becomes attention to all
 *   fa3_quantize   numbers become E4M3 codes and scales, which fa3_forward reads
 *
 * How to make one:
 *
 *   fa3_forward_args args = {.struct_size = sizeof args};
 *   args.query = fa3_dense(query, FA3_BFLOAT16, batch, seqlen, heads, head_dim);
 *   ... key, value, output the same way ...
 *   args.flags = FA3_CAUSAL;
 *   args.lse = fa3_lse(lse, batch, heads, seqlen);  // optional; the backward pass needs it
 *   if (fa3_forward_workspace(&args, &args.workspace_size)) return fail(fa3_last_error());
 *   args.workspace = malloc(args.workspace_size);
 *   if (fa3_forward(&args)) return fail(fa3_last_error());
 *
 * and for the gradients:
 *
 *   fa3_backward_args back = {.struct_size = sizeof back};
 *   if (fa3_backward_init(&args, &back)) return fail(fa3_last_error());
 *   back.grad_output = fa3_dense(grad_output, FA3_BFLOAT16, batch, seqlen, heads, head_dim);
 *   back.grad_query = fa3_dense(grad_query, FA3_BFLOAT16, batch, seqlen, heads, head_dim);
 *   ... grad_key, grad_value; then workspace and call as above ...
 *
 * On a GPU tensors and workspace are in its memory, and the work is queued:
 *
 *   args.device = (fa3_device){FA3_CUDA, 0};
 *   args.stream = stream;
 *
 * Rules that hold for every function:
 *
 * - A call returns a status; fa3_last_error() explains the last failure on this thread.
 *   No call aborts, prints, or keeps a pointer of the caller's after it has returned
 *   (on a GPU: after the work it queued has run). dlclose leaves the library in the process.
 * - The caller owns all memory. Calls may run at the same time from several threads, each
 *   with its own workspace and outputs.
 * - Argument structs begin with their size and grow only at the end. Zero means "default"
 *   for every field, so a struct cleared with {0} or memset is a valid start. A struct
 *   larger than this library's is taken if what the library does not know is zero, and
 *   refused otherwise; it is never ignored.
 */
#ifndef FA3_H
#define FA3_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FA3_VERSION_MAJOR 0
#define FA3_VERSION_MINOR 1
#define FA3_VERSION_PATCH 0

#ifdef __GNUC__
#define FA3_API __attribute__((visibility("default")))
#else
#define FA3_API
#endif

/* Describes the memory of its first argument and does not look at it: an output's has no contents
 * yet. */
#if defined __GNUC__ && !defined __clang__ && __GNUC__ >= 11
#define FA3_DESCRIBES __attribute__((access(none, 1)))
#else
#define FA3_DESCRIBES
#endif

/* "0.1.0" of the library that runs, which may be newer than this header. */
FA3_API const char *fa3_version(void);

/* Status. */

/* 1..99: the arguments are wrong, whatever the machine. 100..199: they are valid, but this
 * build, engine or machine can't do it. 200..299: it failed while running. New values are
 * added within these ranges. */
typedef int32_t fa3_status;
enum {
  FA3_OK = 0,
  FA3_INVALID_STRUCT = 1,       /* a null args pointer, a struct_size that no version had */
  FA3_INVALID_DEVICE = 2,       /* an unknown device type, an index out of range */
  FA3_INVALID_POINTER = 3,      /* a needed pointer is null or not aligned to its element */
  FA3_INVALID_DTYPE = 4,        /* an unknown dtype, or one that this operand can't have */
  FA3_INVALID_SHAPE = 5,        /* a rank or extent that is wrong or does not match */
  FA3_INVALID_STRIDE = 6,       /* negative, not contiguous where it must be, overlapping */
  FA3_INVALID_LENGTHS = 7,      /* contents of cu_seqlens, seqused, leftpad, index, pages,
                                   positions; max_seqlen */
  FA3_INVALID_FLAGS = 8,        /* an unknown flag, or a field set that needs a flag */
  FA3_INVALID_SCALE = 9,        /* softmax_scale is not finite, a scale's rows are negative */
  FA3_INVALID_SOFTCAP = 10,     /* softcap is negative, below 2^-126 or not finite */
  FA3_INVALID_WINDOW = 11,      /* window_left or window_right below -1 */
  FA3_INVALID_WORKSPACE = 12,   /* the workspace is null or too small */
  FA3_INVALID_STREAM = 13,      /* a stream with a device that has none */
  FA3_INVALID_THREADS = 14,     /* num_threads, reserved_multiprocessors: negative, wrong device */
  FA3_INVALID_RESERVED = 15,    /* a reserved field is not zero */
  FA3_INVALID_ENVIRONMENT = 16, /* FA3_CPU_LEVEL names no level, or one that is not here;
                                   FA3_CHECK_DEVICE or FA3_DEPENDENT_LAUNCH is not 0 or 1 */
  FA3_INVALID_INDEX = 17,       /* fa3_get_kernel_info's index is not in the table */
  FA3_INVALID_SPLITS = 18,      /* num_splits or split_keys is negative, or both are set */

  FA3_UNSUPPORTED = 100,    /* a valid request outside fa3_supports' table */
  FA3_NO_DRIVER = 101,      /* CUDA asked for, no NVIDIA driver found */
  FA3_DRIVER_TOO_OLD = 102, /* CUDA asked for, the driver's CUDA is older than 12.0, or of a
                               smaller major version than the nvcc that built the library */
  FA3_NO_HOPPER_GPU = 103,  /* CUDA asked for, no GPU of compute capability 9.0 */

  FA3_OUT_OF_MEMORY = 200,
  FA3_DEVICE_ERROR = 201, /* the driver reported an error; the message says which */
  FA3_INTERNAL_ERROR = 202
};

/* "FA3_INVALID_SHAPE" and so on; "unknown status" for a value outside the enum. */
FA3_API const char *fa3_status_name(fa3_status status);

/* What went wrong in the last call that failed on this thread: the argument, its value and
 * what was expected, in one line of UTF-8. Empty if none has failed. The text stays valid
 * until the next failing call on the same thread. */
FA3_API const char *fa3_last_error(void);

/* Tensors. */

/* 1..15 floating point, 16..31 reserved for block formats, 32..47 integers. */
typedef int32_t fa3_dtype;
enum {
  FA3_FLOAT32 = 1,
  FA3_FLOAT16 = 2,
  FA3_BFLOAT16 = 3,
  /* One byte: sign, 4 bits of exponent, 3 of mantissa, up to 448; 0x7f and 0xff are NaN and there
   * is no infinity (OCP's E4M3, elsewhere E4M3FN). */
  FA3_FLOAT8_E4M3 = 4,
  FA3_INT32 = 32,
  FA3_INT64 = 33
};

/* Bytes of one element; 0 for an unknown dtype. */
FA3_API size_t fa3_dtype_size(fa3_dtype dtype);

/* A view of the caller's memory. An optional tensor that is absent is all zero. `data` may be
 * null where there are no elements. Strides are in elements and never negative; the last
 * dimension is contiguous (stride 1) where its extent is above 1. Every other stride is free:
 * 0 (an expanded tensor) for inputs, anything for dimensions of extent 1. An output's
 * strides must keep its elements apart, and its memory must be no other tensor's of the call, which
 * nothing checks. `data` is aligned to its element. Inputs are only read. Entries of shape and
 * strides from `rank` on, and `reserved`, are zero. */
typedef struct fa3_tensor {
  void *data;
  fa3_dtype dtype;
  int32_t rank;
  int64_t shape[4];
  int64_t strides[4];
  uint64_t reserved[6];
} fa3_tensor;

/* A contiguous (batch, seqlen, heads, head_dim) tensor. Memory that is only read may be const, here
 * and in the functions below; of an output's it is not. */
FA3_API FA3_DESCRIBES fa3_tensor fa3_dense(const void *data, fa3_dtype dtype, int64_t batch,
                                           int64_t seqlen, int64_t heads, int64_t head_dim);

/* A contiguous (total, heads, head_dim) tensor: sequences packed one after the other. */
FA3_API FA3_DESCRIBES fa3_tensor fa3_packed(const void *data, fa3_dtype dtype, int64_t total,
                                            int64_t heads, int64_t head_dim);

/* A contiguous vector, for lengths and sinks. */
FA3_API FA3_DESCRIBES fa3_tensor fa3_vector(const void *data, fa3_dtype dtype, int64_t extent);

/* A contiguous float32 (batch, heads, seqlen) tensor, for lse and its gradient; and that of a
 * packed batch, (heads, total). */
FA3_API FA3_DESCRIBES fa3_tensor fa3_lse(const void *data, int64_t batch, int64_t heads,
                                         int64_t seqlen);
FA3_API FA3_DESCRIBES fa3_tensor fa3_packed_lse(const void *data, int64_t heads, int64_t total);

/* Describes a DLPack tensor (a `const DLTensor *`, DLPack 1.x layout) in place; nothing is
 * copied. Strides of a tensor without elements become a contiguous one's, as NumPy leaves them 0.
 * FA3_INVALID_DTYPE for a dtype or lane count that libfa3 does not have, FA3_INVALID_SHAPE for more
 * than 4 dimensions, FA3_INVALID_DEVICE for memory that is neither the CPU's nor CUDA's. */
FA3_API fa3_status fa3_tensor_from_dlpack(const void *dl_tensor, fa3_tensor *tensor);

/* Devices. */

typedef int32_t fa3_device_type;
enum { FA3_CPU = 0, FA3_CUDA = 1 };

typedef struct fa3_device {
  fa3_device_type type;
  int32_t index; /* 0 for the CPU; the CUDA ordinal for a GPU */
} fa3_device;

/* Loads and configures everything that calls on the device need, once, so that the first
 * call is as fast as the next. Optional. Where the device can't be used the status and the
 * message say why: FA3_NO_DRIVER, FA3_DRIVER_TOO_OLD, FA3_NO_HOPPER_GPU, FA3_INVALID_DEVICE,
 * FA3_UNSUPPORTED (this build has no kernels for it), FA3_INVALID_ENVIRONMENT.
 *
 * With FA3_CHECK_DEVICE=1 in the environment, as it is when a GPU is prepared or first used, every
 * call there waits for its stream, reads what is in the tensors of lengths, pages, indices and
 * positions, and refuses what the CPU would refuse (FA3_INVALID_LENGTHS, the message names the
 * tensor and the element) before it queues anything. For finding mistakes: it takes the time of a
 * copy, and a stream that is being captured is refused.
 *
 * Kernels begin while those ahead of them in their stream end (programmatic dependent launch).
 * With FA3_DEPENDENT_LAUNCH=0, read likewise, each begins after those ahead have ended. That is for
 * several processes that take turns at one GPU, without MPS: there launches that never ended were
 * seen, of processes that call from several streams; with FA3_DEPENDENT_LAUNCH=0 none. With this
 * setting each launch takes 0.5 to 1 us more of the host, and kernels do not overlap. */
FA3_API fa3_status fa3_prepare(fa3_device device);

typedef struct fa3_device_info {
  size_t struct_size; /* set by the caller */
  char name[128];     /* the processor's or the GPU's, zero-terminated */
  char level[32];     /* what the engine runs there: "avx512bf16", "sm_90a", ... */
  int32_t units;      /* threads that a call uses by default, at most; or SMs */
  int32_t reserved;
  uint64_t memory_bytes; /* the machine's or the GPU's */
} fa3_device_info;

/* How many devices of a type there are: 1 for the CPU, the GPUs that the driver shows
 * (of any kind) for CUDA, 0 without a driver. */
FA3_API int32_t fa3_device_count(fa3_device_type type);

/* Describes a device, also one that fa3_prepare refuses. */
FA3_API fa3_status fa3_get_device_info(fa3_device device, fa3_device_info *info);

/* What is supported. */

/* The value 3 is reserved. */
typedef int32_t fa3_phase;
enum { FA3_FORWARD = 1, FA3_BACKWARD = 2, FA3_QUANTIZE = 4, FA3_APPEND = 5, FA3_COMBINE = 6 };

/* What a call can ask for beside plain attention. */
typedef uint64_t fa3_features;
enum {
  FA3_FEATURE_VARLEN_QUERY = 1 << 0,  /* cu_seqlens_q */
  FA3_FEATURE_VARLEN_KEY = 1 << 1,    /* cu_seqlens_k */
  FA3_FEATURE_GROUPED_HEADS = 1 << 2, /* fewer key heads than query heads */
  FA3_FEATURE_CAUSAL = 1 << 3,
  FA3_FEATURE_WINDOW = 1 << 4,
  FA3_FEATURE_SOFTCAP = 1 << 5,
  FA3_FEATURE_SINK = 1 << 6,
  FA3_FEATURE_LSE = 1 << 7,
  FA3_FEATURE_SEQUSED_QUERY = 1 << 8,
  FA3_FEATURE_SEQUSED_KEY = 1 << 9,
  FA3_FEATURE_LEFTPAD_KEY = 1 << 10,
  FA3_FEATURE_BATCH_INDEX = 1 << 11, /* cache_batch_index; not of the backward pass */
  FA3_FEATURE_DIAGONAL = 1 << 12,
  /* Backward alone. */
  FA3_FEATURE_GRAD_LSE = 1 << 13,
  FA3_FEATURE_ACCUMULATE = 1 << 14,
  FA3_FEATURE_DETERMINISTIC = 1 << 15,
  /* Forward. */
  FA3_FEATURE_PAGE_TABLE = 1 << 16
};

typedef struct fa3_capability {
  size_t struct_size;
  fa3_device device;
  fa3_phase phase;
  fa3_dtype query_dtype; /* append: of new_key; quantize: of input */
  fa3_dtype key_dtype;
  fa3_dtype value_dtype;
  fa3_dtype output_dtype; /* backward: of output and grad_output; quantize: of codes; for combine
                             this and value_head_dim are used */
  int32_t head_dim;       /* of query and key; quantize: of input */
  int32_t value_head_dim; /* of value and output */
  fa3_features features;
} fa3_capability;

/* FA3_OK if a call like this is supported on the device's engine, FA3_UNSUPPORTED with the
 * reason otherwise. It answers for the engine, not for the machine: fa3_prepare says whether
 * the device is there. */
FA3_API fa3_status fa3_supports(const fa3_capability *capability);

/* One compiled kernel or processor level. */
typedef struct fa3_kernel_info {
  size_t struct_size; /* set by the caller */
  char engine[16];    /* "cpu", "cuda" */
  char name[48];      /* "avx512", "forward 128x128 pages", ...: no two rows are alike */
  fa3_phase phase;
  fa3_dtype dtype;        /* of query, key and value */
  int32_t head_dim;       /* the largest it takes */
  int32_t value_head_dim; /* the largest it takes */
  int32_t usable;         /* 1 if this machine can run it */
  int32_t selected;       /* 1 if calls with this dtype run on it now */
} fa3_kernel_info;

/* The table of compiled kernels, of attention and its gradients: how many rows, and row `index`,
 * from 0. */
FA3_API int32_t fa3_kernel_count(void);
FA3_API fa3_status fa3_get_kernel_info(int32_t index, fa3_kernel_info *info);

/* Flags. One without a note belongs to fa3_forward and fa3_backward. */

enum {
  /* Query i sees key j only if j <= i + diagonal, where diagonal = seqlen_k - seqlen_q
   * unless `diagonal` is given: the last query sees the last key. */
  FA3_CAUSAL = 1 << 0,
  /* window_left and window_right are used. */
  FA3_WINDOW = 1 << 1,
  /* softmax_scale is used. */
  FA3_SCALE = 1 << 2,
  /* Backward alone: gradients are added to what the tensors hold (a ring of GPUs sums so). */
  FA3_ACCUMULATE = 1 << 3,
  /* Backward alone: the same arguments give bitwise the same gradients, whatever else runs. Both
   * engines keep to that without the flag too, as it costs them nothing; it is for callers who
   * rely on it. */
  FA3_DETERMINISTIC = 1 << 4,
  /* Append and quantize: rotary embedding rotates elements 2i and 2i + 1 together; else i and
   * rotary_dim / 2 + i. */
  FA3_ROTARY_INTERLEAVED = 1 << 5, /* needs rotary_cos */
  /* Quantize alone. */
  FA3_SUBTRACT_MEAN = 1 << 6, /* each head's mean row is taken off first */
  FA3_ROTATE = 1 << 7,        /* heads are rotated first, by seed */
  /* Append alone, for fa3_append_forward: no sequence attends to another's new rows. Sequences may
   * still share older rows: pages, or an entry of the cache. */
  FA3_SEPARATE_SEQUENCES = 1 << 8
};

/* Forward. */

/* Arguments of fa3_forward.
 *
 * Shapes. With a dense batch, tensors have rank 4: query (batch, seqlen_q, heads_q,
 * head_dim), key (batch, seqlen_k, heads_k, head_dim), value (batch, seqlen_k, heads_k,
 * value_head_dim), output (batch, seqlen_q, heads_q, value_head_dim). With cu_seqlens_q,
 * query and output are packed, (total_q, heads_q, ...); with cu_seqlens_k, key and value
 * are packed, (total_k, heads_k, ...); with page_table they are in pages, (pages, page_size,
 * heads_k, ...). The choices for queries and for keys are independent: one token, a few, or a part
 * of a prompt for each sequence of a packed batch, beside a cache of any layout.
 *
 * Query head h reads key head h / (heads_q / heads_k); heads_q is a multiple of heads_k.
 * Head dims are multiples of 8 (of E4M3 tensors 16) from there to 256; key's and value's may
 * differ.
 *
 * Numerics. Both products and the softmax accumulate in float32. On 16-bit inputs the
 * probabilities may be rounded to the input's dtype before the second product, as every
 * FlashAttention does. On E4M3 inputs a GPU rounds the probabilities to E4M3 too, and sums a few
 * thousand keys at a time with about 13 bits. In some calls it rounds them to float16 instead: with
 * 16-bit queries, with few queries, with split_keys, in part of the calls with a page table, and
 * where it expects kernels that split keys to be faster (docs/fp8.md has the list). Each
 * probability is then multiplied by its value's scale and divided by a number that all of the row
 * have in common, so that they fit into float16. The CPU computes in float32 throughout. Float32
 * queries are taken on the CPU alone so far.
 *
 * Edges. A query that sees no key gives output 0 and lse -infinity (without a sink).
 * Empty sequences and an empty batch are not errors. NaN and infinity reach the rows that
 * see them; what lies outside a sequence (the next one of a packed batch, unused cache
 * rows, padding) never does, whatever it holds. A non-finite value of a key that is masked
 * inside the same sequence may reach a row: unspecified. */
typedef struct fa3_forward_args {
  size_t struct_size; /* sizeof(fa3_forward_args) */
  fa3_device device;  /* where all tensors live and the work runs; zero is the CPU */
  void *stream;       /* CUstream for a GPU (null: the default stream); null for the CPU */

  fa3_tensor query;  /* float32, float16, bfloat16 or E4M3 */
  fa3_tensor key;    /* query's dtype, or E4M3; on a GPU E4M3 tensors start at a multiple of 16
                        bytes, and their strides are multiples of it */
  fa3_tensor value;  /* key's dtype */
  fa3_tensor output; /* query's dtype or float32, of E4M3 float32, float16 or bfloat16; written,
                        except rows past seqused_q */

  /* Optional output, float32: the natural logarithm of the sum of exp(score), sink
   * included: (batch, heads_q, seqlen_q), or (heads_q, total_q) with cu_seqlens_q. */
  fa3_tensor lse;

  /* Optional, (heads_q), float32 or query's dtype: a logit per head that joins the
   * softmax's denominator and nothing else (as in gpt-oss). Not scaled, not capped. */
  fa3_tensor sink;

  /* Optional, int32, (batch + 1): where each packed sequence starts, and at the end where the
   * last one ends: from 0, never falling, at most the packed rows. For the CPU their contents
   * are checked on every call; on a GPU they are what they are when the work runs, and nothing
   * checks them, but where FA3_CHECK_DEVICE asks for it (fa3_prepare). The same holds for all
   * lengths, pages, indices and positions below. */
  fa3_tensor cu_seqlens_q;
  fa3_tensor cu_seqlens_k;

  /* Optional, int32, (batch): how many rows of each sequence are used, counted from its
   * first; the rest are neither read nor written. At most the sequence's extent. */
  fa3_tensor seqused_q;
  fa3_tensor seqused_k;

  /* Optional, int32, (batch): the first row of each sequence's keys that counts; rows
   * before it are padding. At most the sequence's used length. The sequence's seqlen_k is
   * what remains, and key 0 is the row at leftpad_k. */
  fa3_tensor leftpad_k;

  /* Optional, int32, (batch): which batch entry of a dense key and value each sequence
   * reads; key and value may then have any batch extent. Refused with cu_seqlens_k. */
  fa3_tensor cache_batch_index;

  /* Optional, int64, (batch): the causal and window diagonal of each sequence, in place
   * of seqlen_k - seqlen_q; a slice of a longer sequence then masks as the whole does.
   * Refused without FA3_CAUSAL or FA3_WINDOW. */
  fa3_tensor diagonal;

  /* Upper bounds of the lengths of any one sequence. Of packed tensors 0 means: taken from the
   * contents of cu_seqlens, which only the CPU can do (on a GPU: FA3_INVALID_LENGTHS). With
   * page_table max_seqlen_k may be given, and 0 means: all rows of a sequence's pages. Zero for
   * other tensors, else FA3_INVALID_FLAGS. */
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  uint32_t flags; /* FA3_CAUSAL and so on */

  float softmax_scale; /* with FA3_SCALE; else it is zero and 1/sqrt(head_dim) is used */
  float softcap;       /* cap * tanh(score / cap) on scaled scores, before the mask; 0: none */

  /* The most CPU threads that this call runs on, the caller's among them; more than 1024 count as
   * 1024. 0: OMP_NUM_THREADS, or else the processors that the process may use (its affinity mask,
   * its control group's share), as they were at the first call. A call takes fewer threads where
   * its work is not worth them, where other calls have them, and where the system gives no more.
   * The others are the library's own, shared by all calls of the process: they sleep between calls,
   * take no signals, and a child of fork() gets its own. */
  int32_t num_threads;

  /* With FA3_WINDOW: query i sees keys from i + diagonal - window_left to
   * i + diagonal + window_right, both inclusive; -1 is unbounded. FA3_CAUSAL forces
   * window_right to 0. Zero without FA3_WINDOW. */
  int64_t window_left;
  int64_t window_right;

  /* Scratch of at least fa3_forward_workspace's size, any alignment, on the device. Its
   * contents on entry do not matter; no two calls under way share one. */
  void *workspace;
  size_t workspace_size;

  /* Multiprocessors of a GPU that the call leaves free for what runs beside it, such as NCCL's
   * kernels; 0: none. The attention kernels take one block on each of the others, and always run
   * on one or two. Not held to it are the kernels for few queries (of decoding), those that attend
   * to an FP8 cache as it is, and those before and after others (the backward pass's preparation,
   * unpacked codes, copies of tensors that take a detour through the workspace). 0 for the CPU,
   * which has num_threads. The workspace's size does not depend on it. Results may: in their last
   * bits, and of E4M3 queries in whether probabilities are rounded to E4M3 or to float16. */
  int32_t reserved_multiprocessors;

  /* Optional, int32, (batch, pages of a sequence): key and value are a cache in pages, and row r of
   * sequence b is row r % page_size of page page_table[b][r / page_size]. Pages may be shared
   * between sequences, and be in any order; entries past a sequence's used length are not read.
   * seqused_k then gives the lengths (else every page is full), at most page_size times the pages
   * of a sequence, and max_seqlen_k may bound them. Not with cu_seqlens_k or cache_batch_index.
   * On the CPU, a page that is not there is FA3_INVALID_LENGTHS; on a GPU its rows count as
   * zeros. */
  fa3_tensor page_table;

  /* Few queries against many keys, or any of few heads, are computed in parts of the keys, side by
   * side, whose results are then put together. How many parts of a sequence there may be; 0: the
   * library chooses, 1: none. */
  int32_t num_splits;

  /* Parts of so many keys, a multiple of 64, counted from the sequence's first: the output of a
   * sequence is then bitwise the same whatever else is in the batch. 0: off. Not with
   * num_splits. */
  int64_t split_keys;

  /* Optional, float32, of E4M3 tensors alone: an element's value is its code times a scale; without
   * one it is the code's. Strides are free. A scale is positive or 0 (below 0 the result is
   * unspecified). One of NaN or infinity gives NaN in the rows of output that see it, and one of
   * query or key in their lse. It never leaves its sequence; but whether it reaches rows there that
   * its keys are masked for, or a query that sees no key, and whether one of value reaches lse, is
   * unspecified: the engines differ.
   *
   *   (1)                        one scale of the whole tensor
   *   (batch, heads)             one of each head of each sequence
   *   (batch, heads, blocks)     with ..._scale_rows above 0: one of that many rows of a head, the
   *                              last block of a sequence maybe shorter
   *   (heads, blocks)            the same with packed sequences: sequence b's blocks begin at
   *                              cu_seqlens[b] / rows + b, and blocks = total / rows + batch
   *
   * `heads` are the tensor's; of query also heads_k, and then its scale is that of its keys' head.
   * `batch` is that of key and value where cache_batch_index is given. Rows are counted from the
   * sequence's first in memory, padding included. With page_table a page stands for a sequence: of
   * key and value (1), (pages, heads), or (pages, heads, blocks) with the blocks of a page. */
  fa3_tensor query_scale;
  fa3_tensor key_scale;
  fa3_tensor value_scale;
  int64_t query_scale_rows; /* rows that share a scale; 0: all of a sequence */
  int64_t key_scale_rows;
  int64_t value_scale_rows;
} fa3_forward_args;

/* Bytes of workspace that fa3_forward needs for these arguments. Checks everything that
 * fa3_forward checks but the tensors' data pointers, the contents of the lengths and the
 * workspace itself, so it also answers whether a call would be taken. The size never falls
 * when a dimension grows, if heads_q grows with heads_k. On a GPU a tensor that does not start
 * at a multiple of 16 bytes, or whose strides are no multiples of it, takes a detour through
 * the workspace; a null data pointer counts as aligned. *bytes is written only on FA3_OK. */
FA3_API fa3_status fa3_forward_workspace(const fa3_forward_args *args, size_t *bytes);

/* Attention. On the CPU it returns when the output is written; on a GPU when the work is
 * queued on `stream`, in that stream's context (for a default stream the current one if it is
 * on the device, else the device's primary one); a graph can capture it. On failure of an
 * argument check nothing is written. The workspace is checked last: where one is needed, a call
 * without it checks everything else, and does no more. */
FA3_API fa3_status fa3_forward(const fa3_forward_args *args);

/* Backward. */

/* Arguments of fa3_backward. What has a name that fa3_forward_args has too is what the forward
 * call took or gave, and its shape and rules are the same; an output of the forward pass is an
 * input here. A gradient has the shape of its tensor. Query, key and value have one dtype: float32
 * (on the CPU alone), float16 or bfloat16. There is no E4M3, page_table or cache_batch_index.
 *
 *   P = exp(scores - lse)              D = rowsum(grad_output * output) - grad_lse
 *   grad_value = P^T grad_output       dS = P * (grad_output value^T - D)
 *   grad_key = scale * dS^T query      grad_query = scale * dS key
 *   grad_sink = -sum over queries of exp(sink - lse) * D
 *
 * (FlashAttention, arXiv 2205.14135, appendix B.2; with a softcap, dS is also multiplied by the
 * derivative of the cap.) Scores are recomputed tile by tile from query, key and lse; no matrix of
 * seqlen_q x seqlen_k is stored. Key's and value's gradients are summed over the query heads of
 * their group.
 *
 * Numerics. Sums are in float32. On 16-bit inputs P and dS may be rounded to the input's dtype
 * before the products they enter; a gradient is rounded once, when it is stored.
 *
 * Edges. A query that sees no key, and a key that no query sees, have gradient 0. Rows that are
 * outside a sequence, past its used length or in its left padding are neither read nor written. */
typedef struct fa3_backward_args {
  size_t struct_size; /* sizeof(fa3_backward_args) */
  fa3_device device;
  void *stream;

  fa3_tensor query;
  fa3_tensor key;
  fa3_tensor value;
  fa3_tensor output;      /* query's dtype or, on the CPU, float32 */
  fa3_tensor lse;         /* needed, float32, sink included */
  fa3_tensor grad_output; /* output's dtype; it may be expanded */

  fa3_tensor grad_query; /* all three are needed and written; each query's dtype or float32 */
  fa3_tensor grad_key;
  fa3_tensor grad_value;

  fa3_tensor grad_lse; /* optional, float32: the gradient of lse, where the loss uses it too */
  fa3_tensor sink;
  fa3_tensor grad_sink; /* with sink only, and then optional; float32 or sink's dtype */

  fa3_tensor cu_seqlens_q;
  fa3_tensor cu_seqlens_k;
  fa3_tensor seqused_q;
  fa3_tensor seqused_k;
  fa3_tensor leftpad_k;
  fa3_tensor diagonal;

  int64_t max_seqlen_q;
  int64_t max_seqlen_k;

  uint32_t flags; /* FA3_CAUSAL and so on, as in the forward call; FA3_ACCUMULATE, ... */

  float softmax_scale;
  float softcap;
  int32_t num_threads;

  int64_t window_left;
  int64_t window_right;

  /* As in fa3_forward_args, of fa3_backward_workspace's size. */
  void *workspace;
  size_t workspace_size;

  int32_t reserved_multiprocessors;
} fa3_backward_args;

/* The backward call of a forward call: all that both have is taken over, tensors, lengths, flags,
 * scale, window, softcap, device, stream and threads. What is left to fill in are grad_output, the
 * gradients, grad_lse if there is one, and the workspace. backward->struct_size is set by the
 * caller. FA3_UNSUPPORTED for a forward call with a tensor that the backward pass does not have. */
FA3_API fa3_status fa3_backward_init(const fa3_forward_args *forward, fa3_backward_args *backward);

/* Bytes of workspace that fa3_backward needs, by fa3_forward_workspace's rules. */
FA3_API fa3_status fa3_backward_workspace(const fa3_backward_args *args, size_t *bytes);

/* The gradients of attention, returning as fa3_forward does. */
FA3_API fa3_status fa3_backward(const fa3_backward_args *args);

/* Append. */

/* Arguments of fa3_append: new keys and values are written into a cache, behind what each sequence
 * has there. What has a name that fa3_forward_args has too is what the forward call takes, and its
 * shape and rules are the same; the new rows are laid out as the queries of that call: dense, or
 * packed with cu_seqlens_q, and seqused_q of them count.
 *
 * With rotary_cos and rotary_sin, rotary embedding rotates new keys before they are written (and
 * queries, if they are given, into rotated_query): of the first rotary_dim elements of a head, a
 * pair (x, y) becomes (x cos - y sin, x sin + y cos), in float32, then rounded; the others stay as
 * they are. The angle is that of the row's position: its index among the sequence's keys, unless
 * positions says it. */
typedef struct fa3_append_args {
  size_t struct_size; /* sizeof(fa3_append_args) */
  fa3_device device;
  void *stream;

  fa3_tensor new_key;   /* (batch, seqlen_q, heads_k, head_dim), or (total_q, ...): any float dtype,
                           with rotary_cos not E4M3 */
  fa3_tensor new_value; /* (batch, seqlen_q, heads_k, value_head_dim), or (total_q, ...); new_key's
                           dtype */
  fa3_tensor key;       /* the cache, dense or in pages; new_key's dtype or E4M3; written */
  fa3_tensor value;     /* key's dtype; written */

  /* Optional, both or neither: queries of the same rows, which rotary embedding rotates as it does
   * the keys: (batch, seqlen_q, heads_q, head_dim), or (total_q, ...); new_key's dtype. They may be
   * the same memory. Needs rotary_cos. */
  fa3_tensor query;
  fa3_tensor rotated_query;

  /* Optional, both or neither: (positions, rotary_dim / 2), float32 or new_key's dtype. */
  fa3_tensor rotary_cos;
  fa3_tensor rotary_sin;

  /* Optional, int32, (batch, seqlen_q) or (total_q): each new row's position in rotary_cos. On the
   * CPU one that is not there is FA3_INVALID_LENGTHS; on a GPU its row becomes NaN. */
  fa3_tensor positions;

  fa3_tensor cu_seqlens_q;
  fa3_tensor seqused_q;

  /* int32, (batch), needed: how many rows each sequence has before the call. On a GPU rows that the
   * cache, or the page table, has no room for are not written; on the CPU that is
   * FA3_INVALID_LENGTHS. */
  fa3_tensor seqused_k;
  fa3_tensor leftpad_k; /* moves positions alone */
  fa3_tensor cache_batch_index;
  fa3_tensor page_table;

  int64_t max_seqlen_q;
  uint32_t flags; /* FA3_ROTARY_INTERLEAVED, FA3_SEPARATE_SEQUENCES */
  int32_t num_threads;

  /* Optional, float32, of an E4M3 cache that new rows of another dtype go into: the cache's scales,
   * in the shapes of fa3_forward_args. A code is the number, after rotary embedding, over its
   * scale, rounded once to nearest even; what is beyond 448 becomes 448, an infinity NaN. Without a
   * scale it is 1.
   *
   * With ..._scale_rows 1 each row of a head has a scale of its own, which is written: the largest
   * finite magnitude / 448, at least 2^-126. Other scales are the caller's and read; where one is
   * 0, codes of finite numbers are finite. They are refused for new rows that are E4M3: their codes
   * are copied, and their scales are the caller's to copy. */
  fa3_tensor key_scale;
  fa3_tensor value_scale;
  int64_t key_scale_rows; /* rows that share a scale; 0: all of a sequence, or page */
  int64_t value_scale_rows;
} fa3_append_args;

/* Needs no workspace. Returns as fa3_forward does. No two sequences may be given the same rows. */
FA3_API fa3_status fa3_append(const fa3_append_args *args);

/* fa3_append, then fa3_forward on the same cache, in one call. On a GPU one kernel does both, in up
 * to 3 us less than two calls take, if
 *
 *   - cache, new rows and rotary tables have one dtype of 16 bits, and head dims are up to 128;
 *   - tensors start at multiples of 16 bytes, which also their strides are, and rotary_dim is a
 *     multiple of 4;
 *   - queries times query heads of a key head are up to 8;
 *   - there is one sequence, or neither page_table nor cache_batch_index, or
 *     FA3_SEPARATE_SEQUENCES is set;
 *   - keys are not divided evenly among the multiprocessors, also inside a sequence, as those of
 *     many sequences are, nor into parts of split_keys that another kernel puts together;
 *   - output and lse lie elsewhere than all that the append reads.
 *
 * Otherwise two kernels run, and it takes about as long as two calls; attention of few queries then
 * begins with older keys while the new ones are written. The device and the stream have to be the
 * same. Two arrays of lengths are needed: append's seqused_k are the lengths before it, forward's
 * those after it. forward may read what the append writes: new rows of the cache, their scales, and
 * rotated_query as its query. New rows of other sequences, in pages or an entry of the cache that
 * they share, have to be among a sequence's newest keys, as many as the append's longest sequence
 * writes times its batch; with FA3_SEPARATE_SEQUENCES it may see none of them.
 * FA3_INVALID_DEVICE if the devices or streams differ; else it returns as either does, and needs
 * forward's workspace alone. Nothing is queued if either's arguments are refused, but for what is
 * found in the memory of a GPU alone: FA3_INVALID_POINTER, and what FA3_CHECK_DEVICE looks at. */
FA3_API fa3_status fa3_append_forward(const fa3_append_args *append,
                                      const fa3_forward_args *forward);

/* Combine. */

/* Arguments of fa3_combine: attention to several sets of keys becomes attention to all of them (a
 * shared prefix and the rest, the parts of a ring of GPUs). Each set's call has written a float32
 * output and its lse, without a sink:
 *
 *   lse = log(sum over sets of exp(lse_i))      output = sum over sets of output_i exp(lse_i - lse)
 *
 * A row that has seen no key of a set has lse_i = -infinity, and that set's output is not read. */
typedef struct fa3_combine_args {
  size_t struct_size; /* sizeof(fa3_combine_args) */
  fa3_device device;
  void *stream;

  fa3_tensor partial_output; /* float32, (sets * batch, seqlen_q, heads_q, value_head_dim): all
                                sequences of the first set, then of the second, ... */
  fa3_tensor partial_lse;    /* float32, (sets * batch, heads_q, seqlen_q) */
  fa3_tensor output; /* (batch, seqlen_q, heads_q, value_head_dim), float32, float16 or bfloat16; a
                        packed batch is one of batch 1 */
  fa3_tensor lse;    /* optional, float32, (batch, heads_q, seqlen_q) */
  int32_t num_threads;
} fa3_combine_args;

/* Needs no workspace. Returns as fa3_forward does. */
FA3_API fa3_status fa3_combine(const fa3_combine_args *args);

/* Quantize. */

/* Arguments of fa3_quantize: rows become E4M3 codes and their scales, as fa3_forward takes them.
 * What has a name that fa3_append_args has too is what fa3_append takes, and its shape and rules
 * are the same.
 *
 *   codes = round(x / codes_scale)       codes_scale = largest |x| of its rows / 448
 *
 * to the nearest code, ties to even, in float32; a scale is 2^-126 at least, so rows of zeros have
 * that. An infinity becomes NaN, and neither counts among the largest. x is the input, after each
 * of these that is asked for, in this order, in float32 but where it says otherwise:
 *
 *   - rotary embedding of the first rotary_dim elements, with rotary_cos and rotary_sin. With
 *     FA3_ROTATE its results are rounded to input's dtype (float16 above 65504 is infinite). If the
 *     tables have that dtype too, and 16 bits, a pair (a, b) becomes r(a cos - r(b sin)) and
 *     r(b cos + r(a sin)), where r rounds to that dtype, and nothing else does;
 *   - FA3_SUBTRACT_MEAN: the mean of the sequence's rows is taken off each head. For keys: all
 *     scores of a query move by the same number, which softmax does not see. lse, a softcap, a sink
 *     and keys that are appended later do see it.
 *   - FA3_ROTATE: elements get random signs, and then a Hadamard transform runs over each head (of
 *     the largest power of two that the head dim holds, then of the largest in what is left, ...),
 *     which spreads an outlier over all of them. It is orthonormal: scores of queries and keys with
 *     the same seed do not change (incoherent processing: FlashAttention-3, arXiv 2407.08608,
 *     section 3.3). Values, rotated, would give a rotated output. Element d of every head becomes
 *     negative where bit d % 64 of the random number d / 64 is set; number n is f(seed + (n + 1)
 *     0x9e3779b97f4a7c15), with f(z) = h(g(g(z, 30, 0xbf58476d1ce4e5b9), 27, 0x94d049bb133111eb)),
 *     g(z, s, m) = (z ^ z >> s) m, h(z) = z ^ z >> 31, modulo 2^64 (splitmix64).
 *
 * Rows past seqused_q are neither read nor written, and neither are scales that no row has. */
typedef struct fa3_quantize_args {
  size_t struct_size; /* sizeof(fa3_quantize_args) */
  fa3_device device;
  void *stream;

  fa3_tensor input; /* (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with
                       cu_seqlens_q; float32, float16 or bfloat16; queries, keys or values */
  fa3_tensor codes; /* E4M3, input's shape; written */

  /* float32, written, any strides that keep its elements apart: (1), (batch, heads) or, with
   * codes_scale_rows above 0, (batch, heads, blocks); of a packed batch (heads, blocks). As
   * fa3_forward's query_scale, but for its heads, which are input's. */
  fa3_tensor codes_scale;

  /* Optional, both or neither: (positions, rotary_dim / 2), float32 or input's dtype. rotary_dim is
   * at most head_dim. */
  fa3_tensor rotary_cos;
  fa3_tensor rotary_sin;

  /* Optional, int32, (batch, seqlen_q) or (total_q): each row's position in rotary_cos; else it is
   * its index in its sequence. One that is not there is FA3_INVALID_LENGTHS on the CPU; on a GPU
   * its row becomes NaN. */
  fa3_tensor positions;

  fa3_tensor cu_seqlens_q;
  fa3_tensor seqused_q;

  int64_t max_seqlen_q;
  int64_t codes_scale_rows; /* that share a scale; 0: all of a sequence */
  uint64_t seed;            /* of FA3_ROTATE; 0 without it */
  uint32_t flags;           /* FA3_SUBTRACT_MEAN, FA3_ROTATE, FA3_ROTARY_INTERLEAVED */
  int32_t num_threads;
} fa3_quantize_args;

/* Needs no workspace. Any head dim up to 256, though fa3_forward takes E4M3 in multiples of 16
 * alone. Both engines give the same bits (any NaN is a NaN), with two exceptions on a GPU: with
 * FA3_SUBTRACT_MEAN, and with FA3_ROTATE for 16-bit input whose head dim is 64, 128 or 256. There
 * sums have another order, and a few codes in a million are neighbours of the CPU's. With both
 * flags the mean is rotated and then taken off, so that magnitudes from 2e37 on may give NaN. The
 * same call on the same GPU always gives the same bits. */
FA3_API fa3_status fa3_quantize(const fa3_quantize_args *args);

#ifdef __cplusplus
}
#endif

#endif
