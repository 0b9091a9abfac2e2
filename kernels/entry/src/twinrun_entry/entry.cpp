// Repeats calls that were planned: one entry from Python into memory, parameters and launches of a whole call, and into
// those of its backward pass. A plan belongs to a key: type, device, sizes, strides and alignment of each tensor, and
// every other argument. entry.py makes plans of what the Python path did; nothing here knows a kernel.
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Integers& key) const {
    uint64_t hash = key.size();
    for (const int64_t value : key) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// Memory that is made, or a view of it.
struct Shape {
  Integers sizes, strides;
  int64_t offset;
};
struct Made {
  at::ScalarType type;
  Shape shape;
  bool zeroed;
  // Whether anybody needs it as a tensor; else it is a piece of one workspace, at so many bytes.
  bool whole;
  int64_t offset;

  int64_t bytes() const {
    int64_t last = 0;
    for (size_t i = 0; i < shape.sizes.size(); ++i) {
      if (shape.sizes[i] == 0) return 0;
      last += (shape.sizes[i] - 1) * shape.strides[i];
    }
    return (last + 1) * static_cast<int64_t>(c10::elementSize(type));
  }
};
struct Output {
  size_t slot;
  // Of a view; else it is the tensor itself.
  std::optional<Shape> view;
};

// A field of a kernel's parameters that holds an address, or where a tensor map begins: of `bytes` behind the start of
// the tensor in `slot`.
struct Address {
  size_t field, slot;
  int64_t bytes;
};

// As recording.py has them. The last two are no kernels but operations of torch, on the tensors of two slots.
enum Kind { EMULATOR, CUDA, HIP, SUM, COPY };
// How a driver starts a kernel, its functions as addresses; see recording.py.
struct Driver {
  Kind kind;
  void *start, *start_overlapping, *push, *pop, *context, *readdress;
  // Raises what a status means.
  py::object refused;
};
struct Launch {
  Driver driver;
  void* function;
  int64_t blocks, threads, shared_bytes;
  bool overlap;
  Integers fields;
  // The fields at which parameters begin: of a struct the first, of Triton's kernels each.
  std::vector<size_t> parameters;
  std::vector<Address> addresses, maps;
  // Of what an operation of torch reads, and of what it writes.
  Integers from, to;
};
// What a driver takes tensor maps in must begin at 64 bytes.
struct alignas(64) Line {
  int64_t fields[8];
};

// Slots are the arguments, then what is made. `kept` is what the backward pass needs besides the arguments.
struct Plan {
  std::vector<Made> made;
  std::vector<Launch> launches;
  std::vector<std::optional<Output>> outputs, kept;
  std::vector<bool> differentiable;
  bool returns_tuple;
  int64_t workspace;
};

struct Operation {
  // Nothing for a call that no plan can be made for.
  std::unordered_map<Integers, std::shared_ptr<const Plan>, KeyHash> plans;
  // The operation of the gradients, and what runs it where it has no plan: a function of gradients, what was kept, and
  // the arguments.
  int64_t backward = -1;
  py::object run_backward;
};

constexpr size_t MOST_PLANS = 4096;
// Never destroyed: Python may be gone by then.
auto& operations = *new std::unordered_map<int64_t, Operation>;
auto& current_stream = *new py::object;

// The arguments of a call; undefined where one is no tensor.
struct Call {
  Tensors tensors;
  Integers key;
  bool requires_grad = false;

  // False where an argument is of a kind that no plan is made for.
  bool read(PyObject* arguments) {
    const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    tensors.reserve(3 * count);
    key.reserve(16 * count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* argument = PyTuple_GET_ITEM(arguments, i);
      const bool taken = THPVariable_Check(argument) ? add(THPVariable_Unpack(argument)) : add_other(argument);
      if (!taken) return false;
    }
    return true;
  }

 private:
  bool add(const Tensor& t) {
    // Somebody besides autograd looks at what is done with these.
    constexpr c10::DispatchKeySet seen({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                        c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
    if (t.layout() != at::kStrided || t.key_set().has_any(seen) || !t.has_storage()) return false;
    requires_grad |= t.requires_grad();
    key.insert(key.end(), {1, static_cast<int64_t>(t.scalar_type()), static_cast<int64_t>(t.device().type()),
                           t.device().index(), reinterpret_cast<intptr_t>(t.data_ptr()) & 15, t.dim()});
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
    tensors.push_back(t);
    return true;
  }
  bool add_other(PyObject* argument) {
    tensors.emplace_back();
    if (argument == Py_None) return key.push_back(0), true;
    if (PyBool_Check(argument)) return key.push_back(argument == Py_True ? 3 : 2), true;
    if (THPDtype_Check(argument)) {
      return key.insert(key.end(), {5, int64_t(reinterpret_cast<THPDtype*>(argument)->scalar_type)}), true;
    }
    if (PyFloat_Check(argument)) {
      const double value = PyFloat_AS_DOUBLE(argument);
      int64_t word;
      memcpy(&word, &value, sizeof word);
      return key.insert(key.end(), {6, word}), true;
    }
    if (PyLong_CheckExact(argument)) {
      int overflow;
      const int64_t value = PyLong_AsLongLongAndOverflow(argument, &overflow);
      return key.insert(key.end(), {7, value}), !overflow;
    }
    if (!PyUnicode_Check(argument)) return false;
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(argument, &size);
    if (!text) throw python_error();
    key.insert(key.end(), {4, size});
    for (Py_ssize_t at = 0; at < size; at += 8) {
      int64_t word = 0;
      memcpy(&word, text + at, std::min<Py_ssize_t>(8, size - at));
      key.push_back(word);
    }
    return true;
  }
};

// The parameters of cuLaunchKernelEx.
struct Attribute {
  unsigned id, padding;
  int allowed;
  char rest[60];
};
struct Config {
  unsigned blocks[3], threads[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
Attribute overlapping = {6, 0, 1, {}};

using Start = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                      void**);
using StartConfigured = int (*)(const Config*, void*, void**, void**);
using StartEmulated = int (*)(const void*, int64_t, int, size_t);

int start_on_gpu(const Launch& launch, int64_t* fields, int index) {
  const Driver& driver = launch.driver;
  void* stream = PyLong_AsVoidPtr(current_stream(index).ptr());
  // Behind the parameters Triton's kernels have up to three addresses of workspace, which those here do without.
  static int64_t nothing = 0;
  std::vector<void*> pointers;
  pointers.reserve(launch.parameters.size() + 3);
  for (const size_t field : launch.parameters) pointers.push_back(fields + field);
  pointers.insert(pointers.end(), 3, &nothing);
  const unsigned blocks = launch.blocks, threads = launch.threads, shared = launch.shared_bytes;
  if (launch.overlap && driver.start_overlapping) {
    const Config config = {{blocks, 1, 1}, {threads, 1, 1}, shared, stream, &overlapping, 1};
    const auto start = reinterpret_cast<StartConfigured>(driver.start_overlapping);
    return start(&config, launch.function, pointers.data(), nullptr);
  }
  return reinterpret_cast<Start>(driver.start)(launch.function, blocks, 1, 1, threads, 1, 1, shared, stream,
                                               pointers.data(), nullptr);
}

int start(const Launch& launch, const std::vector<char*>& begins, at::Device device) {
  const Driver& driver = launch.driver;
  std::vector<Line> lines(launch.fields.size() / 8 + 1);
  int64_t* fields = lines[0].fields;
  std::copy(launch.fields.begin(), launch.fields.end(), fields);
  const auto address_of = [&](const Address& one) { return begins[one.slot] + one.bytes; };
  for (const Address& one : launch.addresses) fields[one.field] = reinterpret_cast<intptr_t>(address_of(one));
  for (const Address& one : launch.maps) {
    const auto readdress = reinterpret_cast<int (*)(void*, void*)>(driver.readdress);
    if (const int status = readdress(fields + one.field, address_of(one))) return status;
  }
  if (driver.kind == EMULATOR) {
    return reinterpret_cast<StartEmulated>(launch.function)(fields, launch.blocks, 0, launch.shared_bytes);
  }
  if (driver.kind == HIP) {
    const c10::DeviceGuard guard(device);
    return start_on_gpu(launch, fields, device.index());
  }
  // A thread of autograd's may have no context yet, or another device's.
  void* popped;
  reinterpret_cast<int (*)(void*)>(driver.push)(driver.context);
  const int status = start_on_gpu(launch, fields, device.index());
  reinterpret_cast<int (*)(void**)>(driver.pop)(&popped);
  return status;
}

Tensors of(const std::vector<std::optional<Output>>& outputs, const Tensors& slots) {
  Tensors found;
  for (const auto& output : outputs) {
    if (!output) {
      found.emplace_back();
    } else if (output->view) {
      const Shape& view = *output->view;
      found.push_back(at::as_strided(slots[output->slot], view.sizes, view.strides, view.offset));
    } else {
      found.push_back(slots[output->slot]);
    }
  }
  return found;
}

void operate(const Launch& launch, const Tensors& slots) {
  const Tensor from = slots[launch.addresses[0].slot].view(launch.from);
  Tensor to = slots[launch.addresses[1].slot].view(launch.to);
  if (launch.driver.kind == SUM) {
    at::sum_out(to, from, launch.fields);
  } else {
    to.copy_(from);
  }
}

// Makes memory, behind the arguments in `slots`, and starts the kernels.
void run(const Plan& plan, Tensors& slots) {
  at::Device device = at::kCPU;
  for (const Tensor& t : slots) {
    if (t.defined()) device = t.device();
  }
  std::vector<char*> begins;
  for (const Tensor& t : slots) begins.push_back(t.defined() ? static_cast<char*>(t.data_ptr()) : nullptr);
  const at::TensorOptions options = at::TensorOptions().device(device);
  // Whoever gets its memory next does so behind the kernels, on their stream.
  Tensor workspace;
  char* room = nullptr;
  if (plan.workspace) {
    workspace = at::empty({plan.workspace}, options.dtype(at::kByte));
    room = static_cast<char*>(workspace.data_ptr());
  }
  for (const Made& made : plan.made) {
    if (!made.whole) {
      slots.emplace_back();
      begins.push_back(room + made.offset);
      continue;
    }
    slots.push_back(at::empty_strided(made.shape.sizes, made.shape.strides, options.dtype(made.type)));
    if (made.zeroed) slots.back().zero_();
    begins.push_back(static_cast<char*>(slots.back().data_ptr()));
  }
  for (const Launch& launch : plan.launches) {
    if (launch.driver.kind >= SUM) {
      operate(launch, slots);
    } else if (const int status = start(launch, begins, device)) {
      launch.driver.refused(status, launch.blocks);
    }
  }
}

py::object wrapped(const Tensor& t) {
  return t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(t)) : py::none();
}

Tensor unwrapped(py::handle object) { return object.is_none() ? Tensor() : THPVariable_Unpack(object.ptr()); }

struct PlannedBackward : torch::autograd::Node {
  const Operation* operation;
  // The arguments: tensors as autograd saves them, and the others in a tuple with None in the place of tensors.
  std::vector<SavedVariable> saved, kept;
  py::object others;

  ~PlannedBackward() override {
    if (!Py_IsInitialized()) {
      others.release();
      return;
    }
    const py::gil_scoped_acquire held;
    others = py::object();
  }
  std::string name() const override { return "RepeatedCallBackward"; }
  void release_variables() override {
    for (SavedVariable& variable : saved) variable.reset_data();
    for (SavedVariable& variable : kept) variable.reset_data();
  }
  variable_list apply(variable_list&& gradients) override {
    const py::gil_scoped_acquire held;
    try {
      variable_list found = gradients_of(arguments(gradients));
      found.resize(saved.size());
      return at::GradMode::is_enabled() ? of_first_order(found) : found;
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (python_error& error) {
    }
    // As the engine hands on what Python raised.
    python_error raised;
    raised.persist();
    throw raised;
  }

 private:
  // Gradients of which there are none.
  static variable_list of_first_order(const variable_list& found) {
    variable_list once;
    for (const Tensor& t : found) {
      if (!t.defined()) {
        once.emplace_back();
        continue;
      }
      const auto refused = std::make_shared<torch::autograd::DelayedError>("no kernel makes a second derivative", 1);
      once.push_back((*refused)({t})[0]);
    }
    return once;
  }
  py::tuple arguments(const variable_list& gradients) {
    py::tuple all(gradients.size() + kept.size() + saved.size());
    size_t place = 0;
    for (const Tensor& t : gradients) all[place++] = wrapped(t);
    for (const SavedVariable& variable : kept) all[place++] = wrapped(variable.unpack());
    for (size_t i = 0; i < saved.size(); ++i) {
      const Tensor t = saved[i].unpack();
      all[place++] = t.defined() ? wrapped(t) : py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(others.ptr(), i));
    }
    return all;
  }
  variable_list gradients_of(const py::tuple& arguments) {
    const at::AutoGradMode without(false);
    const auto& plans = operations[operation->backward].plans;
    Call call;
    if (call.read(arguments.ptr())) {
      call.key.push_back(false);
      const auto plan = plans.find(call.key);
      if (plan != plans.end() && plan->second) {
        const std::shared_ptr<const Plan> found = plan->second;
        run(*found, call.tensors);
        return of(found->outputs, call.tensors);
      }
    }
    variable_list found;
    for (const py::handle gradient : py::tuple(operation->run_backward(*arguments))) {
      found.push_back(unwrapped(gradient));
    }
    return found;
  }
};

// Makes outputs results of the arguments, for autograd.
void remember(const Operation& operation, const Plan& plan, PyObject* arguments, const Tensors& given,
              const Tensors& slots, Tensors& outputs) {
  std::shared_ptr<PlannedBackward> node(new PlannedBackward, torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(given));
  node->operation = &operation;
  py::tuple others(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    node->saved.emplace_back(given[i], false);
    PyObject* argument = given[i].defined() ? Py_None : PyTuple_GET_ITEM(arguments, i);
    others[i] = py::reinterpret_borrow<py::object>(argument);
  }
  node->others = std::move(others);
  // A result that is kept must not hold itself; what shares its memory knows when that is changed.
  for (const Tensor& t : of(plan.kept, slots)) node->kept.emplace_back(t.detach(), false);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (plan.differentiable[i]) torch::autograd::set_history(outputs[i], node);
  }
}

bool wants_gradient(const Operation& operation, const Call& call) {
  return operation.backward >= 0 && call.requires_grad && at::GradMode::is_enabled();
}

// repeat(operation, arguments): the result; NotImplemented for a call that is not known; None where there is no plan.
PyObject* repeat(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const Operation& operation = operations[PyLong_AsLongLong(given[0])];
  Call call;
  if (!call.read(given[1])) Py_RETURN_NONE;
  const bool with_gradient = wants_gradient(operation, call);
  // Whoever asked to see what is saved, as checkpointing does, counts it.
  if (with_gradient && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) Py_RETURN_NONE;
  call.key.push_back(with_gradient);
  const auto known = operation.plans.find(call.key);
  if (known == operation.plans.end()) Py_RETURN_NOTIMPLEMENTED;
  if (!known->second) Py_RETURN_NONE;
  const std::shared_ptr<const Plan> plan = known->second;
  Tensors slots = call.tensors, outputs;
  {
    const at::AutoGradMode without(false);
    run(*plan, slots);
    outputs = of(plan->outputs, slots);
  }
  if (with_gradient) remember(operation, *plan, given[1], call.tensors, slots, outputs);
  if (!plan->returns_tuple) return wrapped(outputs[0]).release().ptr();
  py::tuple all(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) all[i] = wrapped(outputs[i]);
  return all.release().ptr();
  END_HANDLE_TH_ERRORS
}

void* pointer(py::handle number) { return reinterpret_cast<void*>(number.cast<uintptr_t>()); }

Shape shape(py::handle given) {
  const auto [sizes, strides, offset] = given.cast<std::tuple<Integers, Integers, int64_t>>();
  return {sizes, strides, offset};
}

std::vector<std::optional<Output>> outputs(py::handle given) {
  std::vector<std::optional<Output>> found;
  for (const py::handle one : given) {
    if (one.is_none()) {
      found.emplace_back();
      continue;
    }
    const py::tuple output = one.cast<py::tuple>();
    found.push_back(Output{output[0].cast<size_t>(), std::nullopt});
    if (!output[1].is_none()) found.back()->view = shape(output[1]);
  }
  return found;
}

std::vector<Address> addresses(py::handle given) {
  std::vector<Address> found;
  for (const auto& [field, slot, bytes] : given.cast<std::vector<std::tuple<size_t, size_t, int64_t>>>()) {
    found.push_back({field, slot, bytes});
  }
  return found;
}

Launch launch(const py::dict& given) {
  const py::tuple driver = given["driver"], shapes = given["shapes"];
  return {{static_cast<Kind>(driver[0].cast<int>()), pointer(driver[1]), pointer(driver[2]), pointer(driver[3]),
           pointer(driver[4]), pointer(driver[5]), pointer(driver[6]), driver[7]},
          pointer(given["function"]),
          given["blocks"].cast<int64_t>(),
          given["threads"].cast<int64_t>(),
          given["shared_bytes"].cast<int64_t>(),
          given["overlap"].cast<bool>(),
          given["fields"].cast<Integers>(),
          given["parameters"].cast<std::vector<size_t>>(),
          addresses(given["addresses"]),
          addresses(given["maps"]),
          shapes[0].cast<Integers>(),
          shapes[1].cast<Integers>()};
}

// Gives what only kernels need a place in one piece of memory, of which to make costs less than of many.
void cut_workspace(Plan& plan, size_t first) {
  constexpr int64_t aligned = 512;
  const auto keep = [&](size_t slot) {
    if (slot >= first) plan.made[slot - first].whole = true;
  };
  for (const auto* outputs : {&plan.outputs, &plan.kept}) {
    for (const auto& output : *outputs) {
      if (output) keep(output->slot);
    }
  }
  for (const Launch& launch : plan.launches) {
    if (launch.driver.kind < SUM) continue;
    for (const Address& one : launch.addresses) keep(one.slot);
  }
  plan.workspace = 0;
  for (Made& made : plan.made) {
    if (made.whole) continue;
    made.offset = plan.workspace;
    plan.workspace += (made.bytes() + aligned - 1) / aligned * aligned;
  }
}

// Remembers how a call is repeated, or with None that it is not.
void add(int64_t number, const py::tuple& arguments, const py::object& given) {
  Operation& operation = operations[number];
  Call call;
  if (!call.read(arguments.ptr())) return;
  call.key.push_back(wants_gradient(operation, call));
  if (operation.plans.size() >= MOST_PLANS) operation.plans.clear();
  if (given.is_none()) {
    operation.plans[call.key] = nullptr;
    return;
  }
  auto plan = std::make_shared<Plan>();
  for (const py::handle one : given["made"]) {
    const py::tuple made = one.cast<py::tuple>();
    const bool zeroed = made[2].cast<bool>();
    plan->made.push_back(
        {reinterpret_cast<THPDtype*>(made[0].ptr())->scalar_type, shape(made[1]), zeroed, zeroed, 0});
  }
  for (const py::handle one : given["launches"]) plan->launches.push_back(launch(one.cast<py::dict>()));
  plan->outputs = outputs(given["outputs"]);
  plan->kept = outputs(given["kept"]);
  plan->differentiable = given["differentiable"].cast<std::vector<bool>>();
  plan->returns_tuple = given["returns_tuple"].cast<bool>();
  cut_workspace(*plan, call.tensors.size());
  operation.plans[call.key] = std::move(plan);
}

// Says by which operation, and by which function where that has no plan, gradients of an operation are made.
void differentiate(int64_t number, int64_t backward, const py::object& run_backward) {
  operations[number].backward = backward;
  operations[number].run_backward = run_backward;
}

// Forgets all plans, and says how a device's stream is found.
void reset(const py::object& stream) {
  for (auto& [number, operation] : operations) operation.plans.clear();
  current_stream = stream;
}

PyMethodDef repeat_method = {"repeat", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(repeat)),
                             METH_FASTCALL, nullptr};

}  // namespace

PYBIND11_MODULE(twinrun_native, module) {
  module.add_object("repeat", py::reinterpret_steal<py::object>(PyCFunction_New(&repeat_method, nullptr)));
  module.def("add", add);
  module.def("differentiate", differentiate);
  module.def("reset", reset);
}
