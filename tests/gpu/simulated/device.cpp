// A simulated CUDA device for CPU builds of torch: memory of the host labelled cuda:N, kernels of the CPU.
//
// Kernels run at once. Copies between a device and page-locked memory do not: like a real GPU's they may be late, so
// they happen only when their stream goes on or is waited for, and until then their target holds 0xFF bytes.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

using namespace at;

namespace {

constexpr int MOST = 16;  // devices of a machine
std::atomic<int> device_count{0};
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId current_streams[MOST] = {};

// ---------------------------------------------------------------------------------------------- what Python is told

py::object* listener = nullptr;       // called with (kind, what, device, stream, bytes); never freed
std::atomic<int> sync_debug_mode{0};  // 1 warns and 2 fails, as torch.cuda.set_sync_debug_mode has it
std::mutex kernels_mutex;
std::map<std::string, int64_t> kernels;  // launches since they were last read

void tell(const char* kind, const std::string& what, int device, int64_t stream = 0, int64_t bytes = 0) {
  if (!listener || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  (*listener)(kind, what, device, stream, bytes);
}

void host_waits(const std::string& what, int device, int64_t stream, bool torch_checks_it = true, int64_t bytes = 0) {
  tell("sync", what, device, stream, bytes);
  if (!torch_checks_it) return;
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

void launched(const std::string& name, int64_t times = 1) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  kernels[name] += times;
}

// ----------------------------------------------------------------------------------------------------------- memory

struct Card {  // the memory of one device, in bytes
  int64_t capacity = int64_t(80) << 30, allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, made = 0;
  int64_t spared = -1, at_least = 0;  // so many allocations of that size succeed before one fails; -1: none does
};
std::mutex memory_mutex;
Card cards[MOST];
std::vector<std::string> uuids;

[[noreturn]] void out_of_memory(int index, int64_t bytes, int64_t capacity, int64_t free) {
  tell("out of memory", "allocation", index, current_streams[index], bytes);
  C10_THROW_ERROR(OutOfMemoryError,
                  c10::str("CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", index,
                           " has a total capacity of ", capacity, " bytes of which ", free, " bytes is free."));
}

void charge(int index, int64_t bytes) {
  std::unique_lock<std::mutex> lock(memory_mutex);
  Card& card = cards[index];
  card.made++;
  bool planted = card.spared >= 0 && bytes >= card.at_least && card.spared-- == 0;
  int64_t free = card.capacity - card.allocated;
  if (planted || bytes > free) {
    lock.unlock();
    out_of_memory(index, bytes, card.capacity, free);
  }
  card.allocated += bytes;
  card.peak = std::max(card.peak, card.allocated);
  card.reserved = std::max(card.reserved, card.allocated);
  card.reserved_peak = std::max(card.reserved_peak, card.reserved);
}

struct Held {  // what a storage under another label keeps alive, and what is given back with it
  Storage storage;
  int device;
  int64_t bytes;
  ~Held() {
    if (!bytes) return;
    std::lock_guard<std::mutex> lock(memory_mutex);
    cards[device].allocated -= bytes;
  }
};

Storage relabelled(const Storage& storage, Device device, int64_t charged = 0) {
  auto held = new Held{storage, device.index(), charged};
  DataPtr data(storage.mutable_data(), held, [](void* one) { delete static_cast<Held*>(one); }, device);
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

Tensor over(Storage storage, DispatchKey key, const Tensor& like) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

// Memory that the host has just got, as the device's own. Like torch's allocator it counts in blocks of 512 bytes.
Tensor on_device(const Tensor& made, int index) {
  int64_t bytes = (int64_t(made.storage().nbytes()) + 511) / 512 * 512;
  if (bytes) charge(index, bytes);
  return over(relabelled(made.storage(), Device(kCUDA, index), bytes), DispatchKey::CUDA, made);
}

// Before the host is asked for what the device could never give.
void check_room(int index, const TensorOptions& kind, int64_t count) {
  int64_t bytes = count * int64_t(kind.dtype().itemsize());
  if (bytes > cards[index].capacity) out_of_memory(index, bytes, cards[index].capacity, 0);
}

Tensor as_host(const Tensor& t) { return over(relabelled(t.storage(), Device(kCPU)), DispatchKey::CPU, t); }

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // page-locked blocks: where they begin, and their size

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  --next;
  return static_cast<const char*>(data) < next->first + next->second;
}

struct PinnedAllocator final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    size_t size = std::max<size_t>(bytes, 1);
    auto block = new DataPtr(c10::GetCPUAllocator()->allocate(size));
    void* data = block->get();
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(data)] = size;
    return DataPtr(data, block, &free, Device(kCPU));
  }
  static void free(void* block) {
    auto data = static_cast<DataPtr*>(block);
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(static_cast<const char*>(data->get()));
    }
    delete data;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

// -------------------------------------------------------------------------------------------------- streams, events

struct Copy {  // one that is under way
  Tensor target, source, staged;
  bool to_host, done = false;
  void read() {  // its stream has come to it
    if (done || staged.defined()) return;
    if (!to_host) {
      target.copy_(source);
      done = true;
    } else {
      staged = source.clone();
    }
  }
  void land() {  // and the host knows so
    read();
    if (!done) target.copy_(staged);
    done = true;
    staged = source = Tensor();
  }
};
using Copies = std::deque<std::shared_ptr<Copy>>;

std::recursive_mutex copies_mutex;

struct Locked {  // a thread that holds it may free tensors of Python's, which takes the GIL: who waits gives that up
  Locked() {
    if (copies_mutex.try_lock()) return;
    if (Py_IsInitialized() && PyGILState_Check()) {
      py::gil_scoped_release let_go;
      copies_mutex.lock();
    } else {
      copies_mutex.lock();
    }
  }
  ~Locked() { copies_mutex.unlock(); }
};

std::map<std::pair<int, c10::StreamId>, Copies> under_way;
std::atomic<int64_t> queued{0};  // copies ever queued: before the first, nothing has to be looked up
std::atomic<c10::StreamId> newest_stream{0};

struct Event {
  Copies before;
};

Copies& copies_of(int device, c10::StreamId stream) {
  Copies& all = under_way[{device, stream}];
  all.erase(std::remove_if(all.begin(), all.end(), [](auto& one) { return one->done; }), all.end());
  return all;
}

struct Plain {  // copies are arithmetic of the CPU, whatever the caller records
  at::AutoDispatchBelowADInplaceOrView below;
};

void go_on(int device) {  // something is launched on the current stream: what was queued before it is read
  if (!queued) return;
  Locked lock;
  Plain plain;
  for (auto& one : copies_of(device, current_streams[device])) one->read();
}

void finish(const Copies& copies) {
  Locked lock;
  Plain plain;
  for (auto& one : copies) one->land();
}

void finish(int device, c10::StreamId stream) {
  if (!queued) return;
  Locked lock;
  finish(copies_of(device, stream));
}

void finish(int device) {
  Locked lock;
  for (auto& [key, copies] : under_way)
    if (key.first == device) finish(copies);
}

void queue(const Tensor& target, const Tensor& source, bool to_host, int device) {
  Locked lock;
  if (target.is_non_overlapping_and_dense()) std::memset(target.mutable_data_ptr(), 0xFF, target.nbytes());
  copies_of(device, current_streams[device]).push_back(std::make_shared<Copy>(Copy{target, source, Tensor(), to_host}));
  queued++;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(kCUDA, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal");
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  static int at_index(Device device) { return device.has_index() ? device.index() : current; }
  Stream getStream(Device device) const override {
    int index = at_index(device);
    return Stream(Stream::UNSAFE, Device(kCUDA, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kCUDA, at_index(device)));
  }
  Stream getNewStream(Device device, int = 0) const override {
    return Stream(Stream::UNSAFE, Device(kCUDA, at_index(device)), ++newest_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count.load()); }

  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked lock;
    if (!*event) *event = new Event;
    auto one = static_cast<Event*>(*event);
    one->before = copies_of(stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Locked lock;
    Plain plain;
    for (auto& one : static_cast<Event*>(event)->before) {
      one->read();
      if (!one->done) copies_of(stream.device_index(), stream.id()).push_back(one);
    }
  }
  bool queryEvent(void* event) const override {
    if (event) finish(static_cast<Event*>(event)->before);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& stream) const override {
    finish(stream.device_index(), stream.id());
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("Stream.synchronize", stream.device_index(), stream.id());
    finish(stream.device_index(), stream.id());
  }
  void synchronizeEvent(void* event) const override {
    host_waits("Event.synchronize", current, current_streams[current], false);
    if (event) finish(static_cast<Event*>(event)->before);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits("torch.cuda.synchronize", device, current_streams[device], false);
    finish(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
const Guard guard;

// ------------------------------------------------------------------------------------------------- random generators

struct CudaGenerator final : CPUGeneratorImpl {  // the CPU's numbers, so that both devices draw the same
  explicit CudaGenerator(int index) { device_ = Device(kCUDA, index); }
};
Generator generators[MOST];
std::mutex random_mutex;

void hand_over(CPUGeneratorImpl* from, CPUGeneratorImpl* to) {
  to->set_engine(from->engine());
  to->set_next_float_normal_sample(from->next_float_normal_sample());
  to->set_next_double_normal_sample(from->next_double_normal_sample());
}

CPUGeneratorImpl* as_cpu(const Generator& one) { return static_cast<CPUGeneratorImpl*>(one.unsafeGetGeneratorImpl()); }

struct Drawing {  // for as long as it lives, what the CPU draws from `stand_in` is the device's
  std::lock_guard<std::mutex> lock{random_mutex};
  CPUGeneratorImpl *own, *used;
  Generator stand_in, before;
  Drawing(const Generator& of_device, bool through_the_default) : own(as_cpu(of_device)) {
    stand_in = through_the_default ? at::detail::getDefaultCPUGenerator() : at::detail::createCPUGenerator();
    used = as_cpu(stand_in);
    if (through_the_default) {
      before = at::detail::createCPUGenerator();
      hand_over(used, as_cpu(before));
    }
    hand_over(own, used);
  }
  ~Drawing() {
    hand_over(used, own);
    if (before.defined()) hand_over(as_cpu(before), used);
  }
};

// ------------------------------------------------------------------------------------------------------------ hooks

struct Hooks final : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return device_count > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return guard.deviceCount(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { guard.setDevice(Device(kCUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return maybeExchangeDevice(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    auto before = current;
    if (device >= 0) guard.setDevice(Device(kCUDA, device));
    return before;
  }
  int getNumGPUs() const override { return device_count; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const Generator& getDefaultGenerator(DeviceIndex device = -1) const override {
    return generators[device < 0 ? current : device];
  }
  Generator getNewGenerator(DeviceIndex device = -1) const override {
    return make_generator<CudaGenerator>(device < 0 ? current : device);
  }
  void deviceSynchronize(DeviceIndex device) const override { guard.synchronizeDevice(device); }
};
static_assert(sizeof(Hooks) == sizeof(CUDAHooksInterface), "they take the place of those that torch has made already");

// -------------------------------------------------------------------------------------- any operator, by CPU kernels

struct Call {
  std::string name;
  int device = -1;
  std::unordered_map<TensorImpl*, Tensor> taken;   // what the CPU gets for each tensor of the device
  std::unordered_map<StorageImpl*, Storage> memory;  // views of one storage stay so
  std::vector<std::pair<Tensor, Tensor>> pairs;

  Tensor take(const Tensor& t, bool may_be_number) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      TORCH_CHECK(t.dim() == 0 && may_be_number, "Expected all tensors to be on the same device, but found at least two "
                  "devices, cuda and ", t.device(), "! (", name, ")");
      return t;
    }
    if (device < 0) device = t.get_device();
    TORCH_CHECK(device == t.get_device(), "Expected all tensors to be on the same device, but found at least two devices"
                ", cuda:", device, " and cuda:", int(t.get_device()), "! (", name, ")");
    auto& known = taken[t.unsafeGetTensorImpl()];
    if (!known.defined()) {
      auto& storage = memory[t.storage().unsafeGetStorageImpl()];
      if (!storage) storage = relabelled(t.storage(), Device(kCPU));
      known = over(storage, DispatchKey::CPU, t);
      pairs.emplace_back(t, known);
    }
    return known;
  }
  Tensor give(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [mine, host] : pairs)
      if (host.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return mine;
    for (auto& [mine, host] : pairs)  // a view of an argument
      if (t.storage().nbytes() && host.storage().data() == t.storage().data())
        return over(mine.storage(), DispatchKey::CUDA, t);
    return on_device(t, device);
  }
  void follow() {  // an out= that was resized, a set_
    for (auto& [mine, host] : pairs) {
      bool moved = host.storage().data() != mine.storage().data();
      if (!moved && host.sizes().equals(mine.sizes())) continue;
      if (moved) mine.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(host, device).storage());
      mine.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
};

bool waits_for_values(const std::string& name) {  // their result, or its size, is read by the host
  static const std::set<std::string> names = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave",
      "aten::_linalg_check_errors"};
  return names.count(name) > 0;
}

bool is_mask(const std::optional<Tensor>& t) {
  return t && t->defined() && (t->scalar_type() == kBool || t->scalar_type() == kByte);
}

// One launch, or one for each tensor where CUDA can't take all of them together.
int64_t launches(const std::string& name, const std::vector<c10::List<Tensor>>& lists, const std::vector<Tensor>& alone) {
  if (name.rfind("aten::_foreach_", 0) != 0 || lists.empty() || lists[0].empty()) return 1;
  auto kind = Tensor(lists[0].get(0)).scalar_type();
  bool fast = true;
  for (auto& list : lists)
    for (const Tensor& t : list) fast &= t.scalar_type() == kind;
  for (auto& t : alone) fast &= t.scalar_type() == kind && t.is_cuda();
  return fast ? 1 : static_cast<int64_t>(lists[0].size());
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call;
  call.name = schema.operator_name().name;
  const auto first = stack->size() - schema.arguments().size();
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  bool masked = false, takes_generator = false;
  size_t generator_at = 0;
  std::vector<c10::List<Tensor>> lists;
  std::vector<Tensor> alone;
  for (size_t i = first; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      alone.push_back(value.toTensor());
      value = call.take(value.toTensor(), true);
    } else if (value.isTensorList()) {
      c10::List<Tensor> taken;
      for (const Tensor& t : value.toTensorList()) taken.push_back(call.take(t, false));
      lists.push_back(taken);
      value = taken;
    } else if (value.isOptionalTensorList()) {  // indices: CUDA takes them from the host, too
      c10::List<std::optional<Tensor>> taken;
      for (std::optional<Tensor> t : value.toOptionalTensorList()) {
        masked |= is_mask(t);
        taken.push_back(t && t->defined() && t->is_cuda() ? std::optional<Tensor>(call.take(*t, true)) : t);
      }
      value = taken;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (call.device < 0) call.device = Guard::at_index(value.toDevice());
      value = Device(kCPU);
    } else if (draws && schema.arguments()[i - first].name() == "generator") {
      takes_generator = true;
      generator_at = i;
    }
  }
  if (call.device < 0) call.device = current;
  go_on(call.device);
  launched(call.name, launches(call.name, lists, alone));
  if (masked || waits_for_values(call.name)) {
    host_waits(masked ? call.name + " with a mask" : call.name, call.device, current_streams[call.device]);
    finish(call.device, current_streams[call.device]);
  }
  if (draws) {
    IValue given = takes_generator ? (*stack)[generator_at] : IValue();
    Drawing drawing(given.isGenerator() ? given.toGenerator() : generators[call.device], !takes_generator);
    if (takes_generator) (*stack)[generator_at] = drawing.stand_in;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  } else {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> given;
      for (const Tensor& t : value.toTensorList()) given.push_back(call.give(t));
      value = given;
    }
  }
}

// ------------------------------------------------------------------------- operators that know where their memory is

int wanted(std::optional<Device> device) { return device ? Guard::at_index(*device) : int(current); }

TensorOptions of_kind(std::optional<ScalarType> kind, std::optional<bool> pin = std::nullopt) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return TensorOptions().dtype(kind.value_or(typeMetaToScalarType(at::get_default_dtype()))).device(kCPU);
}

Tensor new_empty(IntArrayRef size, std::optional<ScalarType> kind, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool> pin, std::optional<MemoryFormat> format) {
  check_room(wanted(device), of_kind(kind, pin), c10::multiply_integers(size));
  return on_device(at::empty(size, of_kind(kind, pin), format), wanted(device));
}

Tensor new_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> kind, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  return on_device(at::empty_strided(size, stride, of_kind(kind, pin)), wanted(device));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Plain plain;
  Tensor to = self.is_cuda() ? as_host(self) : self, from = source.is_cuda() ? as_host(source) : source;
  const bool crosses = self.is_cuda() != source.is_cuda();
  const int device = self.is_cuda() ? self.get_device() : source.get_device();
  const auto stream = current_streams[device];
  go_on(device);
  if (!crosses) {
    if (source.get_device() != device) go_on(source.get_device());
    launched("aten::copy_");
    to.copy_(from);
    return self;
  }
  const Tensor& host = self.is_cuda() ? source : self;
  const bool locked = is_pinned(host.storage().data());
  const std::string what = std::string(self.is_cuda() ? "copy to the device" : "copy to the host") +
                           (locked ? ", page-locked" : ", pageable");
  const int64_t bytes = host.nbytes();
  launched(what);
  if (non_blocking && locked) {
    tell("copy", what, device, stream, bytes);
    queue(to, from, !self.is_cuda(), device);
    return self;
  }
  if (non_blocking && self.is_cuda())
    tell("pageable", what, device, stream, bytes);  // the host goes on once the bytes are staged
  else
    host_waits(what, device, stream, true, bytes);
  finish(device, stream);
  to.copy_(from);
  return self;
}

IntArrayRef numbers(SymIntArrayRef sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); }

Tensor new_view(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  std::optional<int64_t> from;
  if (offset) from = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, numbers(size), numbers(stride), from);
}

Tensor reshaped_view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, numbers(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, numbers(size), numbers(stride));
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  Tensor wanted = at::empty(numbers(size), of_kind(self.scalar_type()), format);
  auto impl = self.unsafeGetTensorImpl();
  if (wanted.nbytes() + self.storage_offset() * self.itemsize() > self.storage().nbytes()) {
    impl->set_storage_keep_dtype(on_device(wanted, self.get_device()).storage());
    impl->set_storage_offset(0);
  }
  impl->set_sizes_and_strides(wanted.sizes(), wanted.strides());
  return self;
}

// What torch's own library does for storages of a GPU, where it is built with CUDA.
void resize_storage(const Tensor& holder, int64_t bytes) {
  auto impl = holder.storage().unsafeGetStorageImpl();
  Tensor wanted = at::empty({bytes}, of_kind(at::kByte));
  if (int64_t kept = std::min(bytes, int64_t(impl->nbytes()))) std::memcpy(wanted.data_ptr(), impl->data(), kept);
  Storage fresh = on_device(wanted, holder.get_device()).storage();
  impl->set_data_ptr(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  impl->set_nbytes(bytes);
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  return self;
}

Tensor& set_storage(Tensor& self, Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(numbers(size), numbers(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage storage) {
  int64_t count = int64_t(storage.nbytes()) / self.itemsize();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_storage_offset(0);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(std::vector<int64_t>{count});
  return self;
}

void record_stream(Tensor& self, Stream stream) {
  tell("record_stream", "record_stream", self.get_device(), stream.id(), self.nbytes());
}

void foreach_copy_(TensorList self, TensorList source, bool non_blocking) {
  for (size_t i = 0; i < self.size(); i++) {
    Tensor target = self[i];
    target.copy_(source[i], non_blocking);
  }
}

// Dropout as the CPU computes it, from the same numbers, so that both devices have the same bits.
std::tuple<Tensor, Tensor> dropout_as_on_cpu(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(kBool))};
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  Tensor kept = noise.to(kBool);
  return {input * noise.div_(1 - p), kept};
}

Tensor dropout_backward_as_on_cpu(const Tensor& gradient, const Tensor& kept, double scale) {
  return gradient * kept.to(gradient.scalar_type()).div_(1 / scale);
}

// Attention by the CPU's flash kernels.
int64_t attention_kind(const Tensor&, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask, double p, bool,
                       std::optional<double>, bool grouped) {
  bool flash = !mask && p == 0 && !grouped && key.dim() == 4 && globalContext().userEnabledFlashSDP();
  return static_cast<int64_t>(flash ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, double p, bool causal, bool, std::optional<double> scale) {
  const int device = query.get_device();
  go_on(device);
  launched("aten::_scaled_dot_product_flash_attention");
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(as_host(query), as_host(key), as_host(value), p,
                                                                     causal, std::nullopt, scale);
  Tensor none = at::empty({0}, query.options().dtype(kLong));
  return {on_device(out, device), on_device(sums, device), none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double p, bool causal, const Tensor&,
    const Tensor&, std::optional<double> scale) {
  const int device = query.get_device();
  go_on(device);
  launched("aten::_scaled_dot_product_flash_attention_backward");
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_host(gradient), as_host(query), as_host(key), as_host(value), as_host(out), as_host(sums), p, causal,
      std::nullopt, scale);
  return {on_device(q, device), on_device(k, device), on_device(v, device)};
}

// Batch norm over all ranks, which only GPUs have kernels for: sums per channel, that is over every dimension but 1.
std::vector<int64_t> beside_channels(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < input.dim(); dim++)
    if (dim != 1) dims.push_back(dim);
  return dims;
}

Tensor per_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = values.numel();
  return values.reshape(shape);
}

std::tuple<Tensor, Tensor> batch_norm_statistics(const Tensor& input, double eps) {
  Tensor x = input.to(kFloat);
  return {x.mean(beside_channels(x)), x.var(beside_channels(x), false).add_(eps).rsqrt_()};
}

std::tuple<Tensor, Tensor> batch_norm_gathered(const Tensor&, const Tensor& mean, const Tensor& invstd,
                                               const std::optional<Tensor>& running_mean,
                                               const std::optional<Tensor>& running_var, double momentum, double eps,
                                               const Tensor& counts) {
  Tensor share = (counts / counts.sum()).reshape({-1, 1}).to(kFloat), n = counts.sum();
  Tensor all = (mean * share).sum(0);
  Tensor var = ((invstd.pow(-2) - eps + (mean - all).square()) * share).sum(0);
  if (running_mean && running_mean->defined()) Tensor(*running_mean).mul_(1 - momentum).add_(all * momentum);
  if (running_var && running_var->defined())
    Tensor(*running_var).mul_(1 - momentum).add_(var * (n / (n - 1)) * momentum);
  return {all, (var + eps).rsqrt()};
}

Tensor batch_norm_applied(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                          const Tensor& mean, const Tensor& invstd, double) {
  Tensor out = (input.to(kFloat) - per_channel(mean, input)) * per_channel(invstd, input);
  if (weight && weight->defined()) out = out * per_channel(*weight, input);
  if (bias && bias->defined()) out = out + per_channel(*bias, input);
  return out.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_reduced(const Tensor& gradient, const Tensor& input,
                                                              const Tensor& mean, const Tensor& invstd,
                                                              const std::optional<Tensor>& weight, bool, bool, bool) {
  Tensor dy = gradient.to(kFloat), dims_sum = dy.sum(beside_channels(input));
  Tensor dy_xmu = (dy * (input.to(kFloat) - per_channel(mean, input))).sum(beside_channels(input));
  auto kind = weight && weight->defined() ? weight->scalar_type() : kFloat;
  return {dims_sum, dy_xmu, (dy_xmu * invstd).to(kind), dims_sum.to(kind)};
}

Tensor batch_norm_backward_applied(const Tensor& gradient, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                           const std::optional<Tensor>& weight, const Tensor& dy, const Tensor& dy_xmu,
                           const Tensor& counts) {
  Tensor n = counts.sum();
  Tensor centred = input.to(kFloat) - per_channel(mean, input);
  Tensor out = gradient.to(kFloat) - per_channel(dy / n, input) -
               centred * per_channel(invstd.square() * dy_xmu / n, input);
  out = out * per_channel(invstd, input);
  if (weight && weight->defined()) out = out * per_channel(*weight, input);
  return out.to(input.scalar_type());
}

// ------------------------------------------------------------------- a process group that answers to the name of NCCL

struct NcclOptions final : c10d::Backend::Options {
  NcclOptions() : Options("nccl") {}
  ~NcclOptions() override {  // torch frees groups without the GIL
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      split_from = config = py::object();
    } else {
      split_from.release();
      config.release();
    }
  }
  bool is_high_priority_stream = false;
  py::object split_from, config;
  int64_t split_color = 0;
};

struct NcclWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<Tensor> results;
  bool blocks, late = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  NcclWork(c10::intrusive_ptr<c10d::Work> inner_, std::vector<Tensor> results_, double factor, bool blocks_)
      : inner(std::move(inner_)), results(std::move(results_)), blocks(blocks_) {
    std::vector<Device> devices;
    if (!results.empty()) devices.push_back(results[0].device());
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    inner->getFuture()->addCallback([future = future, results = results, factor](c10::ivalue::Future& done) {
      if (done.hasError()) return future->setError(done.exception_ptr());
      finish(*future, results, factor);
    });
  }
  NcclWork(std::vector<Tensor> results_, double factor)  // of what is done already
      : NcclWork(nullptr, std::move(results_)) {
    finish(*future, results, factor);
  }
  NcclWork(c10::intrusive_ptr<c10d::Work> inner_, std::vector<Tensor> results_)  // of what gloo has no future of
      : inner(std::move(inner_)), results(std::move(results_)), blocks(false), late(inner) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                      std::vector<Device>{results[0].device()});
  }
  static void finish(c10::ivalue::Future& future, const std::vector<Tensor>& results, double factor) {
    Plain plain;
    if (factor != 1)
      for (auto& one : results) as_host(one).mul_(factor);
    future.markCompleted(IValue(results));
  }
  bool isCompleted() override { return future->completed(); }
  bool isSuccess() const override { return future->completed() && !future->hasError(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (blocks) host_waits("barrier", current, current_streams[current], false);
    if (inner) inner->wait(timeout);
    if (late && !future->completed()) finish(*future, results, 1);
    future->waitAndThrow();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<Tensor> result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

struct Nccl final : c10d::Backend {
  c10::intrusive_ptr<Backend> gloo;
  c10::intrusive_ptr<NcclOptions> options;
  c10::intrusive_ptr<c10d::Store> store;
  Nccl(c10::intrusive_ptr<Backend> gloo_, int rank, int size, c10::intrusive_ptr<NcclOptions> options_,
       c10::intrusive_ptr<c10d::Store> store_)
      : Backend(rank, size), gloo(std::move(gloo_)), options(std::move(options_)), store(std::move(store_)) {}

  bool supportsSplitting() const override { return true; }  // or torch would not connect at once
  void eagerConnectSingleDevice(Device device) override {  // as NCCL does: two ranks can't share a GPU
    auto key = [](int rank) { return "gpu/" + std::to_string(rank); };
    const std::string& own = uuids[device.index()];
    store->set(key(getRank()), std::vector<uint8_t>(own.begin(), own.end()));
    for (int rank = 0; rank < getSize(); rank++) {
      auto other = store->get(key(rank));
      if (rank != getRank() && std::string(other.begin(), other.end()) == own)
        C10_THROW_ERROR(DistBackendError,
                        c10::str("NCCL error: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
                                 "Last error:\nDuplicate GPU detected : rank ", getRank(), " and rank ", rank,
                                 " both on CUDA device ", own));
    }
  }

  using Many = std::vector<Tensor>;
  using Works = c10::intrusive_ptr<c10d::Work>;

  Many host(const Many& tensors, const char* name) const {
    Many out;
    for (auto& t : tensors) {
      TORCH_CHECK(t.is_cuda(), name, ": NCCL takes no tensors on ", t.device());
      TORCH_CHECK(t.is_non_overlapping_and_dense(), name, ": Tensors must be contiguous");
      go_on(t.get_device());
      out.push_back(as_host(t));
    }
    launched(std::string("nccl::") + name);
    return out;
  }
  std::vector<Many> host(const std::vector<Many>& lists, const char* name) const {
    std::vector<Many> out;
    for (auto& list : lists) out.push_back(host(list, name));
    return out;
  }
  static Many flat(const std::vector<Many>& lists) {
    Many out;
    for (auto& list : lists) out.insert(out.end(), list.begin(), list.end());
    return out;
  }
  Works work(Works inner, const Many& results, double factor = 1, bool blocks = false) const {
    return c10::make_intrusive<NcclWork>(std::move(inner), results, factor, blocks);
  }
  template <class O>
  double without_mean(O& opts) const {  // gloo knows no mean
    if (opts.reduceOp != c10d::ReduceOp::AVG) return 1;
    opts.reduceOp = c10d::ReduceOp::SUM;
    return 1.0 / getSize();
  }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options->timeout = timeout;
    gloo->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }
  void waitForPendingWorks() override {}

  Works broadcast(Many& t, const c10d::BroadcastOptions& opts) override {
    auto h = host(t, "broadcast");
    return work(gloo->broadcast(h, opts), t);
  }
  Works allreduce(Many& t, const c10d::AllreduceOptions& opts) override {
    auto h = host(t, "all_reduce");
    auto own = opts;
    double factor = without_mean(own);
    return work(gloo->allreduce(h, own), t, factor);
  }
  Works allreduce_coalesced(Many& t, const c10d::AllreduceCoalescedOptions& opts) override {
    auto h = host(t, "all_reduce");
    auto own = opts;
    double factor = without_mean(own);
    return work(gloo->allreduce_coalesced(h, own), t, factor);
  }
  Works reduce(Many& t, const c10d::ReduceOptions& opts) override {
    auto h = host(t, "reduce");
    auto own = opts;
    double factor = without_mean(own);
    return work(gloo->reduce(h, own), t, getRank() == own.rootRank ? factor : 1);
  }
  Works allgather(std::vector<Many>& out, Many& in, const c10d::AllgatherOptions& opts) override {
    auto o = host(out, "all_gather");
    auto i = host(in, "all_gather");
    return work(gloo->allgather(o, i, opts), flat(out));
  }
  Works _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    auto h = host(Many{out, in}, "all_gather");
    Tensor all = h[0].view(-1), own = h[1].view(-1);  // gloo deals it out by the first dimension
    return work(gloo->_allgather_base(all, own, opts), {out});
  }
  Works allgather_into_tensor_coalesced(Many& out, Many& in, const c10d::AllgatherOptions& opts) override {
    auto o = host(out, "all_gather"), i = host(in, "all_gather");
    return work(gloo->allgather_into_tensor_coalesced(o, i, opts), out);
  }
  Works gather(std::vector<Many>& out, Many& in, const c10d::GatherOptions& opts) override {
    auto o = host(out, "gather");
    auto i = host(in, "gather");
    return work(gloo->gather(o, i, opts), flat(out));
  }
  Works scatter(Many& out, std::vector<Many>& in, const c10d::ScatterOptions& opts) override {
    auto o = host(out, "scatter");
    auto i = host(in, "scatter");
    return work(gloo->scatter(o, i, opts), out);
  }
  Works reduce_scatter(Many& out, std::vector<Many>& in, const c10d::ReduceScatterOptions& opts) override {
    auto o = host(out, "reduce_scatter");
    auto i = host(in, "reduce_scatter");
    auto own = opts;
    double factor = without_mean(own);
    return work(gloo->reduce_scatter(o, i, own), out, factor);
  }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    auto h = host(Many{out, in}, "reduce_scatter");
    auto own = opts;
    double factor = without_mean(own);
    gloo->_reduce_scatter_base(h[0], h[1], own)->wait();  // gloo has no future of it
    return c10::make_intrusive<NcclWork>(Many{out}, factor);
  }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                      const c10d::AllToAllOptions& opts) override {
    auto h = host(Many{out, in}, "all_to_all");
    return work(gloo->alltoall_base(h[0], h[1], out_sizes, in_sizes, opts), {out});
  }
  Works send(Many& t, int to, int tag) override {
    auto h = host(t, "send");
    return c10::make_intrusive<NcclWork>(gloo->send(h, to, tag), t);
  }
  Works recv(Many& t, int from, int tag) override {
    auto h = host(t, "recv");
    return c10::make_intrusive<NcclWork>(gloo->recv(h, from, tag), t);
  }
  Works barrier(const c10d::BarrierOptions& opts) override {
    launched("nccl::barrier");
    return work(gloo->barrier(opts), {}, 1, true);
  }
};

struct DdpTimer final : c10d::Timer {
  explicit DdpTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};

// ---------------------------------------------------------------------------------------------- what Python steers

// Where torch has a composite beside the CPU's kernel it would take that for a device of its own; a GPU has a kernel.
void take_kernels() {
  static torch::Library all(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& known : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(known);
    if (!op || known.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    const bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                           op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    const bool foreach = known.name.rfind("aten::_foreach_", 0) == 0;
    if (!composite || !(foreach || op->hasKernelForDispatchKey(DispatchKey::CPU))) continue;
    std::string name = known.name.substr(6) + (known.overload_name.empty() ? "" : "." + known.overload_name);
    all.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// A process that has run a backward pass on the CPU, or was forked from one, has no threads for devices yet.
struct Threads : torch::autograd::Engine {
  static void start() {
    Engine& engine = get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*&Threads::device_ready_queues_).empty()) (engine.*&Threads::start_device_threads)();
  }
};

void begin(const std::vector<int64_t>& capacities, const std::vector<std::string>& names) {
  uuids = names;
  TORCH_CHECK(capacities.size() <= MOST, "at most ", MOST, " devices");
  for (size_t i = 0; i < capacities.size(); i++) {
    cards[i] = Card();
    cards[i].capacity = capacities[i];
    generators[i] = make_generator<CudaGenerator>(static_cast<int>(i));
  }
  device_count = static_cast<int>(capacities.size());
  // torch asks for its hooks once, maybe before this library was loaded: the ones that it has become these.
  auto hooks = const_cast<CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  if (!dynamic_cast<Hooks*>(hooks)) new (hooks) Hooks();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kind);
  static std::once_flag once;
  std::call_once(once, take_kernels);
  Threads::start();
}

std::map<std::string, int64_t> memory(int device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  Card& card = cards[device];
  return {{"allocated", card.allocated}, {"peak", card.peak}, {"reserved", card.reserved},
          {"reserved_peak", card.reserved_peak}, {"capacity", card.capacity}, {"made", card.made}};
}

c10::intrusive_ptr<Nccl> nccl(const py::object& store, int rank, int size, const c10::intrusive_ptr<NcclOptions>& options) {
  auto distributed = py::module_::import("torch._C._distributed_c10d");
  py::object gloo = distributed.attr("ProcessGroupGloo")(store, rank, size, py::cast(options).attr("_timeout"));
  return c10::make_intrusive<Nccl>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size, options,
                                   store.cast<c10::intrusive_ptr<c10d::Store>>());
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DdpTimer)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", new_empty);
  m.impl("empty_strided", new_strided);
  m.impl("copy_", copy_);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("as_strided", new_view);
  m.impl("view", reshaped_view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", dropout_as_on_cpu);
  m.impl("native_dropout_backward", dropout_backward_as_on_cpu);
  m.impl("_scaled_dot_product_flash_attention", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
  m.impl("batch_norm_stats", batch_norm_statistics);
  m.impl("batch_norm_gather_stats_with_counts", batch_norm_gathered);
  m.impl("batch_norm_elemt", batch_norm_applied);
  m.impl("batch_norm_backward_reduce", batch_norm_reduced);
  m.impl("batch_norm_backward_elemt", batch_norm_backward_applied);
  // as a whole, or they would be dealt out among the CPU's kernels as no CPU tensor is
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  m.def("begin", &begin, py::call_guard<py::gil_scoped_release>());
  m.def("listen", [](const py::object& one) { listener = one.is_none() ? nullptr : new py::object(one); });
  m.def("device", [] { return int(current); });
  m.def("exchange_device", [](int device) { return int(static_cast<const Hooks&>(at::detail::getCUDAHooks()).maybeExchangeDevice(device)); });
  m.def("stream", [](int device) { return current_streams[device]; });
  m.def("set_stream", [](int device, c10::StreamId stream) { current = device, current_streams[device] = stream; });
  m.def("synchronize", [](int device) { guard.synchronizeDevice(device); });
  m.def("sync_debug_mode", [] { return sync_debug_mode.load(); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("generator", [](int device) { return generators[device]; });
  m.def("memory", &memory);
  m.def("resize_storage", &resize_storage);
  m.def("reset_peak", [](int device) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    cards[device].peak = cards[device].allocated;
    cards[device].reserved_peak = cards[device].reserved;
  });
  m.def("empty_cache", [] {
    std::lock_guard<std::mutex> lock(memory_mutex);
    for (auto& card : cards) card.reserved = card.allocated;
  });
  m.def("fail_allocation", [](int device, int64_t after, int64_t at_least) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    cards[device].spared = after;
    cards[device].at_least = at_least;
  });
  m.def("kernels", [] {
    std::lock_guard<std::mutex> lock(kernels_mutex);
    return std::exchange(kernels, {});
  });
  py::class_<NcclOptions, c10::intrusive_ptr<NcclOptions>, c10d::Backend::Options>(m, "NcclOptions")
      .def(py::init([](bool) { return c10::make_intrusive<NcclOptions>(); }), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("split_from", &NcclOptions::split_from)
      .def_readwrite("split_color", &NcclOptions::split_color)
      .def_readwrite("config", &NcclOptions::config);
  py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(m, "ProcessGroupNCCL")
      .def(py::init(&nccl))
      .def("perform_nocolor_split", [](Nccl&, const Device&) {})
      .def("_set_default_timeout", &Nccl::setTimeout)
      .def_property_readonly("options", [](const Nccl& group) { return group.options; });
}
