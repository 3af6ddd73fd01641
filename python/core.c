/* fa3._core: libfa3's calls on Python objects. A tensor is whatever speaks DLPack: through the C
 * exchange functions of its type (`__dlpack_c_exchange_api__`: PyTorch from 2.10), which cost
 * nanoseconds and know the current stream, else through `__dlpack__`, which every array library
 * has. Nothing here is PyTorch's, and only Python's limited API is used: one build serves every
 * version of both. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"
#include "phases.h"
#include "xla.h"

static PyObject *raise_status(fa3_status status) {
  PyObject *type = PyExc_RuntimeError;
  if (status < 100) type = PyExc_ValueError;
  if (status == FA3_INVALID_DTYPE) type = PyExc_TypeError;
  if (status == FA3_UNSUPPORTED) type = PyExc_NotImplementedError;
  if (status == FA3_OUT_OF_MEMORY) type = PyExc_MemoryError;
  PyErr_SetString(type, fa3_last_error());
  return NULL;
}

static PyObject *names[NUM_PHASES][MAX_FIELDS]; /* of the phases' fields, interned */

/* What a call needs to know of Python's side. */
struct call {
  const struct phase *phase;
  union arguments args;
  const fa3_append_args *append; /* of fa3_append_forward, before a forward call; or null */
  int on_gpu, device_known;
  int stream_given;
  const struct dlpack_exchange *exchange; /* that of the first tensor on a GPU */
  PyObject *capsules[MAX_FIELDS];         /* of tensors without exchange functions */
  int num_capsules;
};

/* The exchange functions of an object's type, or null. The last type's are remembered. */
static const struct dlpack_exchange *exchange_of(PyObject *object) {
  static PyObject *name, *known_type;
  static const struct dlpack_exchange *known;
  PyObject *type = (PyObject *)Py_TYPE(object);
  if (type == known_type) return known;
  if (!name) name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  const struct dlpack_exchange *found = NULL;
  PyObject *capsule = PyObject_GetAttr(type, name);
  if (capsule) {
    found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  if (found && (found->header.version.major != 1 || !found->tensor_from_py_object)) found = NULL;
  Py_INCREF(type); /* a type that is remembered must not be replaced at its address */
  Py_XDECREF(known_type);
  known_type = type;
  known = found;
  return found;
}

/* The capsule that an object's __dlpack__ gives: of DLPack 1, which can say that memory is
 * read-only, or of an older version where the object knows no other. */
static PyObject *capsule_of(PyObject *object) {
  PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
  if (!method) return NULL;
  PyObject *none = PyTuple_New(0), *version = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
  PyObject *capsule = none && version ? PyObject_Call(method, none, version) : NULL;
  Py_XDECREF(version);
  Py_XDECREF(none);
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    capsule = PyObject_CallNoArgs(method);
  }
  Py_DECREF(method);
  return capsule;
}

/* The DLTensor of an object, valid while the call has its capsule, if it needed one. */
static int view(struct call *call, PyObject *object, const struct field *field,
                struct dl_tensor *tensor) {
  const struct dlpack_exchange *exchange = exchange_of(object);
  if (exchange) {
    if (exchange->tensor_from_py_object(object, tensor)) {
      if (PyErr_ExceptionMatches(PyExc_RuntimeError))
        PyErr_Format(
            PyExc_ValueError,
            "%s is sparse, quantized or without memory: expected a dense tensor on the CPU "
            "or on an NVIDIA GPU",
            field->name);
      return -1;
    }
    if (!call->exchange) call->exchange = exchange;
    return 0;
  }
  PyObject *capsule = capsule_of(object);
  if (!capsule) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError))
      PyErr_Format(PyExc_TypeError, "%s is of %R: expected a tensor (an object with __dlpack__)",
                   field->name, Py_TYPE(object));
    return -1;
  }
  call->capsules[call->num_capsules++] = capsule;
  if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    const struct dl_managed_tensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed) return -1;
    *tensor = managed->tensor;
    return 0;
  }
  const struct dl_managed_tensor_versioned *managed =
      PyCapsule_GetPointer(capsule, "dltensor_versioned");
  if (managed->version.major != 1) {
    PyErr_Format(PyExc_BufferError, "%s is of DLPack %u: expected 1", field->name,
                 managed->version.major);
    return -1;
  }
  if (is_written(field) && managed->flags & DL_READ_ONLY) {
    PyErr_Format(PyExc_ValueError, "%s is read-only, and is written", field->name);
    return -1;
  }
  *tensor = managed->tensor;
  return 0;
}

/* Sets an argument that is a tensor. */
static int set_tensor(struct call *call, PyObject *object, const struct field *field) {
  const char *name = field->name;
  struct dl_tensor tensor;
  if (view(call, object, field, &tensor)) return -1;
  fa3_status status =
      fa3_tensor_from_dlpack(&tensor, (fa3_tensor *)((char *)&call->args + field->offset));
  if (status) {
    PyObject *type = status == FA3_INVALID_DTYPE ? PyExc_TypeError : PyExc_ValueError;
    /* The message begins with the C argument's name. */
    static const char theirs[] = "dl_tensor";
    const char *message = fa3_last_error();
    const size_t skipped = strncmp(message, theirs, sizeof theirs - 1) ? 0 : sizeof theirs - 1;
    PyErr_Format(type, "%s%s%s", name, skipped ? "" : ": ", message + skipped);
    return -1;
  }
  int on_gpu = tensor.device.type == DL_CUDA || tensor.device.type == DL_CUDA_MANAGED;
  int index = on_gpu ? tensor.device.index : 0;
  fa3_device *device = &call->args.common.device;
  if (!call->device_known) {
    call->device_known = 1;
    call->on_gpu = on_gpu;
    *device = (fa3_device){on_gpu ? FA3_CUDA : FA3_CPU, index};
  } else if (on_gpu != call->on_gpu || index != device->index) {
    PyErr_Format(PyExc_ValueError, "%s is on %s %d, and the first tensor on %s %d", name,
                 on_gpu ? "CUDA device" : "CPU", index, call->on_gpu ? "CUDA device" : "CPU",
                 device->index);
    return -1;
  }
  return 0;
}

static int set_field(struct call *call, const struct field *field, PyObject *value) {
  if (value == Py_None) return 0;
  if (is_tensor(field)) return set_tensor(call, value, field);
  double real = 0;
  long long integer = 0;
  if (field->kind == FLOAT)
    real = PyFloat_AsDouble(value);
  else
    integer = PyLong_AsLongLong(value);
  if ((real == -1 || integer == -1) && PyErr_Occurred()) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError))
      PyErr_Format(PyExc_OverflowError, "%s is %S", field->name, value);
    else if (PyErr_ExceptionMatches(PyExc_TypeError))
      PyErr_Format(PyExc_TypeError, "%s is of %R: expected %s", field->name, Py_TYPE(value),
                   field->kind == FLOAT ? "a number" : "an integer");
    return -1;
  }
  if (field->kind == FLOAT) {
    const float rounded = (float)real;
    *(float *)((char *)&call->args + field->offset) = rounded;
    /* 0 has a meaning of its own, such as no softcap. */
    if (rounded != 0 || real == 0) return 0;
    PyErr_Format(PyExc_OverflowError, "%s is %S: as a float32 it is 0", field->name, value);
    return -1;
  }
  if (!set_integer(&call->args, field, integer)) return 0;
  PyErr_Format(PyExc_OverflowError, "%s is %lld", field->name, integer);
  return -1;
}

/* The index of a keyword in the phase's fields, -1 if there is none. */
static int field_index(const struct phase *phase, PyObject *name) {
  PyObject *const *interned = names[phase - phases];
  for (int i = 0; i < phase->num_fields; i++)
    if (interned[i] == name) return i;
  for (int i = 0; i < phase->num_fields; i++)
    if (!PyUnicode_Compare(interned[i], name)) return i;
  return -1;
}

/* Sets the argument of this name, which may be the stream. */
static int set_argument(struct call *call, PyObject *name, PyObject *value) {
  static PyObject *stream;
  if (!stream) stream = PyUnicode_InternFromString("stream");
  if (!PyUnicode_Compare(name, stream)) {
    if (value == Py_None) return 0;
    call->args.common.stream = PyLong_AsVoidPtr(value);
    call->stream_given = 1;
    return PyErr_Occurred() ? -1 : 0;
  }
  int index = field_index(call->phase, name);
  if (index >= 0) return set_field(call, &call->phase->fields[index], value);
  PyErr_Format(PyExc_TypeError, "%s has no argument %R", call->phase->name, name);
  return -1;
}

static int set_stream(struct call *call) {
  if (!call->on_gpu || call->stream_given) return 0;
  if (!call->exchange) {
    PyErr_SetString(PyExc_TypeError,
                    "stream is needed: these tensors are on a GPU, and their type has no "
                    "__dlpack_c_exchange_api__ to ask for the current one");
    return -1;
  }
  return call->exchange->current_work_stream(DL_CUDA, call->args.common.device.index,
                                             &call->args.common.stream);
}

static fa3_status run(struct call *call, void *workspace, size_t bytes) {
  if (!call->append) return call->phase->run(&call->args, workspace, bytes);
  call->args.forward.workspace = workspace;
  call->args.forward.workspace_size = bytes;
  return fa3_append_forward(call->append, &call->args.forward);
}

static void raise_allocation(void *context, const char *kind, const char *message) {
  (void)context;
  PyErr_Format(PyExc_MemoryError, "workspace: %s: %s", kind, message);
}

/* Calls the library with memory of the tensors' own allocator, which on a GPU is one that gives
 * memory back in the stream's order. */
static int run_on_gpu(struct call *call, size_t bytes) {
  struct dl_managed_tensor_versioned *workspace = NULL;
  if (bytes) {
    if (!call->exchange) {
      PyErr_SetString(PyExc_TypeError,
                      "this call needs a workspace, and the tensors' type has no "
                      "__dlpack_c_exchange_api__ to allocate one with");
      return -1;
    }
    int64_t shape = (int64_t)bytes, stride = 1;
    struct dl_tensor prototype = {.device = {DL_CUDA, call->args.common.device.index},
                                  .ndim = 1,
                                  .dtype = {DL_UINT, 8, 1},
                                  .shape = &shape,
                                  .strides = &stride};
    if (call->exchange->allocate(&prototype, &workspace, NULL, raise_allocation)) return -1;
  }
  fa3_status status;
  Py_BEGIN_ALLOW_THREADS status = run(call, workspace ? workspace->tensor.data : NULL, bytes);
  Py_END_ALLOW_THREADS if (workspace) workspace->deleter(workspace);
  if (status) raise_status(status);
  return status ? -1 : 0;
}

static int run_on_cpu(struct call *call, size_t bytes) {
  void *workspace = malloc(bytes);
  if (bytes && !workspace) {
    PyErr_Format(PyExc_MemoryError, "a workspace of %zu bytes", bytes);
    return -1;
  }
  fa3_status status;
  Py_BEGIN_ALLOW_THREADS status = run(call, workspace, bytes);
  Py_END_ALLOW_THREADS free(workspace);
  if (status) raise_status(status);
  return status ? -1 : 0;
}

static struct call new_call(int phase) {
  struct call call = {.phase = &phases[phase]};
  call.args.common.struct_size = call.phase->struct_size;
  return call;
}

static void end_call(struct call *call) {
  for (int i = 0; i < call->num_capsules; i++) Py_DECREF(call->capsules[i]);
}

/* The call, once its arguments are set. */
static int run_call(struct call *call) {
  size_t bytes = 0;
  fa3_status status = call->phase->workspace(&call->args, &bytes);
  if (status) raise_status(status);
  if (status) return -1;
  return call->on_gpu ? run_on_gpu(call, bytes) : run_on_cpu(call, bytes);
}

static PyObject *run_phase(int phase, PyObject *const *values, Py_ssize_t count,
                           PyObject *keywords) {
  struct call call = new_call(phase);
  if (count) {
    PyErr_Format(PyExc_TypeError, "%s takes keyword arguments alone", call.phase->name);
    return NULL;
  }
  int failed = 0;
  Py_ssize_t given = keywords ? PyTuple_Size(keywords) : 0;
  for (Py_ssize_t i = 0; i < given && !failed; i++)
    failed = set_argument(&call, PyTuple_GetItem(keywords, i), values[i]);
  failed = failed || set_stream(&call) || run_call(&call);
  end_call(&call);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

static PyObject *forward(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *keywords) {
  (void)self;
  return run_phase(FORWARD_PHASE, values, count, keywords);
}

static PyObject *backward(PyObject *self, PyObject *const *values, Py_ssize_t count,
                          PyObject *keywords) {
  (void)self;
  return run_phase(BACKWARD_PHASE, values, count, keywords);
}

static PyObject *append(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *keywords) {
  (void)self;
  return run_phase(APPEND_PHASE, values, count, keywords);
}

static int set_from_dict(struct call *call, PyObject *arguments) {
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(arguments, &position, &name, &value))
    if (set_argument(call, name, value)) return -1;
  return set_stream(call);
}

static PyObject *append_forward(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *of_append, *of_forward;
  if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &of_append, &PyDict_Type, &of_forward))
    return NULL;
  struct call first = new_call(APPEND_PHASE), second = new_call(FORWARD_PHASE);
  second.append = &first.args.append;
  int failed =
      set_from_dict(&first, of_append) || set_from_dict(&second, of_forward) || run_call(&second);
  end_call(&first);
  end_call(&second);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

static PyObject *combine(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *keywords) {
  (void)self;
  return run_phase(COMBINE_PHASE, values, count, keywords);
}

static PyObject *quantize(PyObject *self, PyObject *const *values, Py_ssize_t count,
                          PyObject *keywords) {
  (void)self;
  return run_phase(QUANTIZE_PHASE, values, count, keywords);
}

static PyObject *version(PyObject *self, PyObject *nothing) {
  (void)self;
  (void)nothing;
  return PyUnicode_FromString(fa3_version());
}

static PyObject *prepare(PyObject *self, PyObject *index) {
  (void)self;
  long number = PyLong_AsLong(index);
  if (number == -1 && PyErr_Occurred()) return NULL;
  if (number != (int32_t)number)
    return PyErr_Format(PyExc_OverflowError, "a device's index is %ld", number);
  fa3_status status;
  Py_BEGIN_ALLOW_THREADS status = fa3_prepare((fa3_device){FA3_CUDA, (int32_t)number});
  Py_END_ALLOW_THREADS if (status) return raise_status(status);
  Py_RETURN_NONE;
}

/* The phase of this name; null, and an error, if there is none. */
static const struct phase *find_phase(const char *name) {
  for (int p = 0; p < NUM_PHASES; p++)
    if (strcmp(name, phases[p].name) == 0) return &phases[p];
  PyErr_Format(PyExc_ValueError, "%s is no phase", name);
  return NULL;
}

static PyObject *arguments(PyObject *self, PyObject *args) {
  (void)self;
  static const char *const kinds[] = {[INPUT] = "INPUT",   [OPTIONAL_INPUT] = "OPTIONAL_INPUT",
                                      [OUTPUT] = "OUTPUT", [OPTIONAL_OUTPUT] = "OPTIONAL_OUTPUT",
                                      [INT32] = "INTEGER", [UINT32] = "INTEGER",
                                      [INT64] = "INTEGER", [FLOAT] = "FLOAT"};
  const char *name;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  const struct phase *phase = find_phase(name);
  PyObject *list = phase ? PyList_New(0) : NULL;
  for (int i = 0; list && i < phase->num_fields; i++) {
    const struct field *field = &phase->fields[i];
    PyObject *pair = Py_BuildValue("(ss)", field->name, kinds[field->kind]);
    if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

static PyObject *xla_handler(PyObject *self, PyObject *args) {
  (void)self;
  const char *name;
  int on_gpu;
  if (!PyArg_ParseTuple(args, "sp", &name, &on_gpu)) return NULL;
  const struct phase *phase = find_phase(name);
  if (!phase) return NULL;
  xla_handler_function *handler = xla_handlers[phase - phases][on_gpu];
  return handler ? PyCapsule_New((void *)(uintptr_t)handler, NULL, NULL)
                 : PyErr_Format(PyExc_NotImplementedError, "%s from XLA", name);
}

#define CALL(function) (PyCFunction)(void (*)(void)) function
static PyMethodDef methods[] = {
    {"forward", CALL(forward), METH_FASTCALL | METH_KEYWORDS,
     "fa3_forward: its argument struct's fields by name. Tensors are objects with DLPack."},
    {"backward", CALL(backward), METH_FASTCALL | METH_KEYWORDS, "fa3_backward, as forward."},
    {"append", CALL(append), METH_FASTCALL | METH_KEYWORDS, "fa3_append, as forward."},
    {"append_forward", append_forward, METH_VARARGS,
     "fa3_append_forward: two dicts, of append's and of forward's arguments."},
    {"combine", CALL(combine), METH_FASTCALL | METH_KEYWORDS, "fa3_combine, as forward."},
    {"quantize", CALL(quantize), METH_FASTCALL | METH_KEYWORDS, "fa3_quantize, as forward."},
    {"arguments", arguments, METH_VARARGS,
     "What a call takes: the names of its argument struct's fields, each with what it is."},
    {"xla_handler", xla_handler, METH_VARARGS,
     "A capsule of this phase's call for jax.ffi, on the CPU or on a GPU."},
    {"prepare", prepare, METH_O, "fa3_prepare of the CUDA device with this index."},
    {"version", version, METH_NOARGS, "fa3_version."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_core", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) {
  PyObject *module = PyModule_Create(&definition);
  if (!module) return NULL;
  for (int p = 0; p < NUM_PHASES; p++)
    for (int i = 0; i < phases[p].num_fields; i++)
      names[p][i] = PyUnicode_InternFromString(phases[p].fields[i].name);
  static const struct {
    const char *name;
    long value;
  } constants[] = {
      {"CAUSAL", FA3_CAUSAL},
      {"WINDOW", FA3_WINDOW},
      {"SCALE", FA3_SCALE},
      {"ACCUMULATE", FA3_ACCUMULATE},
      {"DETERMINISTIC", FA3_DETERMINISTIC},
      {"ROTARY_INTERLEAVED", FA3_ROTARY_INTERLEAVED},
      {"SUBTRACT_MEAN", FA3_SUBTRACT_MEAN},
      {"ROTATE", FA3_ROTATE},
      {"SEPARATE_SEQUENCES", FA3_SEPARATE_SEQUENCES},
  };
  for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
    if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) return NULL;
  return module;
}
