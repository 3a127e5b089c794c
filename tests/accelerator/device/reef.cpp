// A PrivateUse1 device in this host's memory: tests use it to rehearse an accelerator on machines that have none.
//
// Its memory is one file, mapped twice. Tensors carry addresses of a mapping without access rights, so a host access is
// a segmentation fault; kernels are the CPU's, run on the same bytes through the other mapping. What a GPU refuses is
// refused: tensors of two devices in one operation, .numpy(), use in a forked child. What makes the host wait on a GPU
// (values read back, blocking copies, results whose size depends on values) is counted, and can be made an error.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Storage;
using torch::jit::Stack;
constexpr auto kHere = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- Memory

struct Arena {
  static constexpr size_t kSpan = size_t(1) << 36;  // Addresses only: a page takes memory when it is first written.
  char *host, *device;
  pid_t owner = getpid();
  std::mutex mutex;
  size_t top = 0, held = 0, peak = 0, calls = 0;
  std::map<size_t, std::vector<size_t>> free;
  std::unordered_map<size_t, size_t> sizes;

  Arena() {
    int file = memfd_create("reef", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kSpan) == 0, "reef: no memory file");
    auto map = [&](int may) { return (char*)mmap(nullptr, kSpan, may, MAP_SHARED | MAP_NORESERVE, file, 0); };
    host = map(PROT_READ | PROT_WRITE);
    device = map(PROT_NONE);
    TORCH_CHECK(host != MAP_FAILED && device != MAP_FAILED, "reef: no addresses");
    close(file);
    madvise(host, kSpan, MADV_DONTDUMP);
  }
  // Sizes are rounded up, so that freed memory fits the next request.
  static size_t room(size_t n) {
    size_t size = 256;
    while (size < n && size < (1 << 20)) size *= 2;
    return n > (1 << 20) ? (n + 0xfffff) & ~size_t(0xfffff) : size;
  }
  void* take(size_t n) {
    if (!n) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(owner == getpid(), "reef: cannot re-initialise the device in a forked child");
    size_t size = room(n), at = top;
    auto& list = free[size];
    if (list.empty()) {
      top += size;
      TORCH_CHECK(top <= kSpan, "reef: out of memory");
    } else {
      at = list.back();
      list.pop_back();
    }
    sizes[at] = n;
    held += n;
    peak = std::max(peak, held);
    ++calls;
    memset(host + at, 0xff, n);  // NaN: a kernel that reads memory before it was written gives NaN.
    return device + at;
  }
  void give_back(void* address) {
    if (!address) return;
    std::lock_guard<std::mutex> lock(mutex);
    size_t at = (char*)address - device, n = sizes[at];
    memset(host + at, 0xff, n);
    held -= n;
    free[room(n)].push_back(at);
  }
  void* seen(const void* address) {
    if (!address) return nullptr;
    size_t at = (char*)address - device;
    TORCH_CHECK(at < kSpan, "reef: an address that is not the device's");
    return host + at;
  }
};
std::atomic<Arena*> made{nullptr};
Arena& arena() {
  static Arena* it = made = new Arena;
  return *it;
}

thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, 64> streams{};
std::atomic<c10::StreamId> next_stream{1};
DeviceIndex how_many() {
  const char* given = getenv("REEF_DEVICES");
  return given ? atoi(given) : 8;
}

struct Allocator final : c10::DeviceAllocator {
  bool initialized() override { return made.load() != nullptr; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  // A process uses one of the devices, so the figures are those of the arena.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = arena().held;
    bytes.peak = arena().peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { arena().peak = arena().held; }
  c10::DataPtr allocate(size_t n) override {
    void* address = arena().take(n);
    return {address, address, &drop, Device(kHere, current)};
  }
  static void drop(void* address) { arena().give_back(address); }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    memcpy(arena().seen(to), arena().seen(from), n);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kHere, &allocator);

void resize_storage(const Storage& storage, size_t n) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr fresh = allocator.allocate(n);
  size_t kept = std::min<size_t>(n, impl->nbytes());
  if (kept) memcpy(arena().seen(fresh.get()), arena().seen(impl->data()), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(n);
}

// ---- Device, streams (in order, so an event has always happened), random numbers

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kHere; }
  Device exchangeDevice(Device d) const override {
    Device before(kHere, current);
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return {kHere, current}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < how_many(), "reef: invalid device ordinal");
    current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, d, streams[at(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(Device d, int) const override { return c10::Stream(c10::Stream::UNSAFE, d, next_stream++); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before = getStream(s.device());
    streams[at(s.device())] = s.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return how_many(); }
  // Kernels have run when their call returns, so an event is the host's time: its nanoseconds are kept in place of a handle.
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = (void*)std::chrono::steady_clock::now().time_since_epoch().count();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return ((int64_t)second - (int64_t)first) * 1e-6;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  static size_t at(Device d) { return d.index() < 0 ? current : d.index(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit Generator(DeviceIndex i) : c10::GeneratorImpl(Device(kHere, i), kKeys) {}
  static c10::DeviceType device_type() { return kHere; }
  uint64_t given = c10::default_rng_seed_val;
  void set_current_seed(uint64_t seed) override {  // As on a GPU, a seed gives other numbers than on the CPU.
    given = seed;
    inner.set_current_seed(seed ^ 0x5e4f5e4f5e4f5e4f);
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "reef: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "reef: generators have no offset"); }
  uint64_t current_seed() const override { return given; }
  uint64_t seed() override { return given = inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};
const at::Generator& default_generator(DeviceIndex i) {
  static auto* all = [] {
    auto* list = new std::vector<at::Generator>;
    for (DeviceIndex d = 0; d < how_many(); ++d) {
      list->push_back(at::make_generator<Generator>(d));
      list->back().seed();  // As on a GPU: not the stream of the CPU's generator.
    }
    return list;
  }();
  return all->at(i < 0 ? current : i);
}

std::unordered_set<const void*> pinned;
std::mutex pinned_mutex;
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* address = n ? aligned_alloc(64, (n + 63) & ~size_t(63)) : nullptr;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(address);
    return {address, address, &drop, c10::kCPU};
  }
  static void drop(void* address) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(address);
    free(address);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return how_many() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return made.load() != nullptr; }
  DeviceIndex deviceCount() const override { return how_many(); }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice({kHere, d}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice({kHere, d}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current : exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current : d);
  }
  Device getDeviceFromPtr(void*) const override { return {kHere, current}; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned it;
    return &it;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t n) const override { resize_storage(storage, n); }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ---- Where the host waits

std::atomic<size_t> waits{0};
std::atomic<bool> waits_are_errors{false};
void host_waits(const std::string& why) {
  ++waits;
  TORCH_CHECK(!waits_are_errors, "reef: the host waits for the device in ", why);
}
// Their results' sizes, or their plain Python results, depend on values.
const std::unordered_set<std::string> reads_values = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave"};

// ---- The CPU's kernels on the device's bytes

bool is_here(const Tensor& t) { return t.defined() && t.device().type() == kHere; }

Tensor over(const Storage& storage, c10::DispatchKeySet keys, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  return made;
}

// One operation: its arguments as tensors of the CPU, and its results as tensors of the device.
struct Crossing {
  std::unordered_map<const c10::StorageImpl*, Storage> seen, whose;  // Device's -> host's, host's -> device's.
  std::vector<std::pair<Tensor, Tensor>> pairs;                      // (the device's, the host's)
  std::optional<Device> device;

  Tensor host(const Tensor& t) {
    if (!is_here(t)) return t;
    TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found at least "
                "two devices, ", *device, " and ", t.device(), "!");
    device = t.device();
    const Storage& own = t.storage();
    auto found = seen.find(own.unsafeGetStorageImpl());
    if (found == seen.end()) {
      c10::DataPtr view(arena().seen(own.data()), new Storage(own), [](void* s) { delete (Storage*)s; }, c10::kCPU);
      Storage alias(Storage::use_byte_size_t(), own.nbytes(), std::move(view), c10::GetAllocator(c10::kCPU), true);
      whose.emplace(alias.unsafeGetStorageImpl(), own);
      found = seen.emplace(own.unsafeGetStorageImpl(), alias).first;
    }
    Tensor alias = over(found->second, c10::DispatchKeySet(c10::DispatchKey::CPU), t);
    pairs.emplace_back(t, alias);
    return alias;
  }
  Tensor back(const Tensor& t) {
    if (!t.defined() || !t.is_cpu() || !device) return t;
    for (auto& [own, alias] : pairs)
      if (alias.is_same(t)) return own;
    auto* from = t.storage().unsafeGetStorageImpl();
    auto found = whose.find(from);
    if (found == whose.end()) {
      c10::OptionalDeviceGuard guard(device);
      Storage fresh(Storage::use_byte_size_t(), from->nbytes(), allocator.allocate(from->nbytes()), &allocator, true);
      if (from->nbytes()) memcpy(arena().seen(fresh.data()), from->data(), from->nbytes());
      found = whose.emplace(from, fresh).first;
      keep.push_back(t);  // So that no other result gets its address.
    }
    return over(found->second, kKeys, t);
  }
  // An `out=` that the kernel made larger.
  void follow() {
    for (auto& [own, alias] : pairs) {
      if (alias.sizes() == own.sizes() && alias.strides() == own.strides()) continue;
      Storage storage = own.storage();
      size_t n = alias.storage().nbytes();
      if (storage.nbytes() < n) resize_storage(storage, n);
      if (alias.storage().data() != arena().seen(storage.data()) && n)
        memcpy(arena().seen(storage.data()), alias.storage().data(), n);
      own.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      own.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
    }
  }
  std::vector<Tensor> keep;
};

// Kernels that move host tensors over by themselves; elsewhere only a tensor without dimensions may come from the host.
const std::unordered_set<std::string> takes_host_tensors = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_copy_from"};

void on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  if (reads_values.count(schema.name())) host_waits(schema.name());
  Crossing crossing;
  size_t first = stack->size() - formal.size();
  auto generator_type = c10::OptionalType::create(c10::GeneratorType::get());
  std::vector<std::pair<Tensor, bool>> hosts;
  auto cross = [&](const Tensor& t, bool written) {
    if (t.defined() && t.is_cpu()) hosts.emplace_back(t, written);
    return crossing.host(t);
  };
  for (size_t n = 0; n < formal.size(); ++n) {
    c10::IValue& value = (*stack)[first + n];
    bool written = formal[n].alias_info() && formal[n].alias_info()->isWrite();
    if (value.isTensor()) {
      value = cross(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(cross(t, written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorList()) {
        // An index of truth values becomes one of places, whose number is not known before.
        if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte || t->is_cpu()))
          host_waits(schema.name() + " by a mask, or by indices in host memory");
        list.push_back(t ? std::optional<Tensor>(cross(*t, written)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kHere) {
      crossing.device = Device(kHere, Guard::at(value.toDevice()));
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      at::Generator given = value.toGenerator();
      if (given.device().type() == kHere) value = given.get<Generator>()->inner;
      else TORCH_CHECK(false, "Expected a '", "reef", "' device type for generator but found '", given.device().type(), "'");
    }
  }
  for (size_t n = 0; n < formal.size(); ++n)  // The device draws from its own numbers.
    if ((*stack)[first + n].isNone() && *formal[n].type() == *generator_type)
      (*stack)[first + n] = default_generator(crossing.device ? crossing.device->index() : -1).get<Generator>()->inner;
  for (auto& [t, written] : hosts)
    TORCH_CHECK(!crossing.device || (!written && (t.dim() == 0 || takes_host_tensors.count(schema.name()))),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                crossing.device.value_or(Device(c10::kCPU)), " and cpu! (in ", schema.name(), ")");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  crossing.follow();
  size_t start = stack->size() - schema.returns().size();
  for (size_t n = start; n < stack->size(); ++n) {
    c10::IValue& value = (*stack)[n];
    if (value.isTensor()) {
      value = crossing.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(crossing.back(t));
      value = list;
    }
  }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

// ---- Operations that manage memory, and those that have no kernel for a device of this kind

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(Device(kHere, Guard::at(device.value_or(Device(kHere, -1)))));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(Device(kHere, Guard::at(device.value_or(Device(kHere, -1)))));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (is_here(from) != is_here(to) && !non_blocking) host_waits(is_here(from) ? "a copy to the host" : "a blocking copy from the host");
  Crossing a, b;  // One for each side: they may be on two devices.
  Tensor target = a.host(to);
  target.copy_(b.host(from));
  return to;
}
const Tensor& resized(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  size_t n = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < n) resize_storage(self.storage(), n);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (is_here(to)) resized(to, from.sizes(), std::nullopt);
  else to.resize_(from.sizes());
  return copy_from(from, to, false);
}
Tensor& set_to(Tensor& self, Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  stride.empty() && !size.empty() ? impl->set_sizes_contiguous(size) : impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_to_all(Tensor& self, Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  return set_to(self, std::move(source), 0, {n}, {1});
}
Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
bool may_replace(const Tensor&, const Tensor&) { return true; }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor kept = at::empty_like(x).bernoulli_(1 - p);
  return {x * kept * (p < 1 ? 1 / (1 - p) : 0.0), kept.to(at::kBool)};
}
std::tuple<Tensor, Tensor, Tensor> as_device(Crossing& c, std::tuple<Tensor, Tensor, Tensor> r) {
  return {c.back(std::get<0>(r)), c.back(std::get<1>(r)), c.back(std::get<2>(r))};
}
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef out_padding,
                   int64_t groups) {
  Crossing c;
  std::optional<Tensor> bias = b && b->defined() ? std::optional<Tensor>(c.host(*b)) : std::nullopt;
  return c.back(at::convolution(c.host(x), c.host(w), bias, stride, padding, dilation, transposed, out_padding, groups));
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& g, const Tensor& x, const Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef out_padding, int64_t groups, std::array<bool, 3> mask) {
  Crossing c;
  return as_device(c, at::convolution_backward(c.host(g), c.host(x), c.host(w), at::IntArrayRef{w.size(transposed ? 1 : 0) * (transposed ? groups : 1)},
                                               stride, padding, dilation, transposed, out_padding, groups, mask));
}

// An accelerator has one kernel for an LSTM cell; here it is made of differentiable parts.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell,
                                             const std::optional<Tensor>& b1, const std::optional<Tensor>& b2) {
  Tensor gates = from_input + from_hidden;
  for (const auto* bias : {&b1, &b2})
    if (*bias && (*bias)->defined()) gates = gates + **bias;
  auto part = gates.chunk(4, 1);
  Tensor next = part[1].sigmoid() * cell + part[0].sigmoid() * part[2].tanh();
  return {part[3].sigmoid() * next.tanh(), next, gates.detach()};
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_thnn_fused_lstm_cell", lstm_cell); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resized);
  m.impl("set_.source_Storage", set_to_all);
  m.impl("set_.source_Storage_storage_offset", set_to);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("_has_compatible_shallow_copy_type", may_replace);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// ---- Autocast, with the lists that every accelerator has

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_OPT)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &how_many);
  m.def("current_device", [] { return current; });
  m.def("set_device", [](DeviceIndex d) { Guard().setDevice({kHere, d}); });
  m.def("is_initialized", [] { return made.load() != nullptr; });
  m.def("default_generator", &default_generator);
  m.def("in_bad_fork", [] { return made.load() != nullptr && made.load()->owner != getpid(); });
  m.def("memory", [] { return std::make_tuple(arena().held, arena().peak, arena().calls); });
  m.def("reset_peak", [] { arena().peak = arena().held; });
  m.def("waits", [] { return waits.load(); });
  m.def("waits_are_errors", [](bool now) { waits_are_errors = now; });
  m.def("host_view", [](const Tensor& t) { return Crossing().host(t.detach()); });  // For the process group.
}
