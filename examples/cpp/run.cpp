// Run a library that tvmcap exported, without Python: libtvm_ffi and TVM's runtime are all it needs.
//
//   run block.so sample.safetensors [calls]
//
// The sample holds the inputs by the names of the arguments and the outputs (out0, out1, ...), as
// `tvmcap run block.so --sample sample.safetensors` writes it. The program calls the library on the
// inputs, compares the results, and times `calls` more calls (100). Exit status 0: they agree.

#include <dlfcn.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "files.h"

namespace {

ffi::Function Global(const char* name) { return ffi::Function::GetGlobalRequired(name); }

size_t BytesOf(const std::vector<int64_t>& shape, DLDataType dtype) {
  size_t count = (dtype.bits + 7) / 8;
  for (int64_t extent : shape) count *= extent;
  return count;
}

ffi::Tensor Empty(const std::vector<int64_t>& shape, DLDataType dtype, DLDevice device) {
  auto allocate = Global("runtime.TVMTensorAllocWithScope");
  return allocate(ffi::Shape(shape), dtype, device, nullptr).cast<ffi::Tensor>();
}

// Samples hold bfloat16 as float32, exactly.
std::vector<char> Narrowed(const Stored& stored) {
  std::vector<char> narrow(stored.size / 2);
  for (size_t i = 0; i < narrow.size() / 2; ++i) {
    std::memcpy(narrow.data() + 2 * i, stored.data + 4 * i + 2, 2);
  }
  return narrow;
}

ffi::Tensor Upload(const Stored& stored, DLDataType dtype, DLDevice device) {
  ffi::Tensor tensor = Empty(stored.shape, dtype, device);
  bool narrow = dtype.code == kDLBfloat && stored.dtype.bits == 32;
  if (!narrow && !(dtype.code == stored.dtype.code && dtype.bits == stored.dtype.bits)) {
    Fail("the sample holds " + std::string(ffi::DLDataTypeToString(stored.dtype)) +
         " where the library takes " + std::string(ffi::DLDataTypeToString(dtype)));
  }
  std::vector<char> data = narrow ? Narrowed(stored)
                                  : std::vector<char>(stored.data, stored.data + stored.size);
  auto copy = Global("runtime.TVMTensorCopyFromBytes");
  copy(tensor, static_cast<void*>(data.data()), data.size());
  return tensor;
}

DLDataType DTypeIn(const json& spec) {
  return ffi::StringToDLDataType(Get<ffi::String>(spec, "dtype"));
}

std::vector<char> Download(const ffi::Tensor& tensor, const std::vector<int64_t>& shape) {
  std::vector<char> data(BytesOf(shape, tensor.dtype()));
  Global("runtime.TVMTensorCopyToBytes")(tensor, static_cast<void*>(data.data()), data.size());
  return data;
}

template <typename T>
double As(const char* data, size_t i) {
  T value;
  std::memcpy(&value, data + i * sizeof(T), sizeof(T));
  return static_cast<double>(value);
}

double HalfToDouble(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double value = exponent == 0    ? std::ldexp(mantissa, -24)
                 : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                  : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -value : value;
}

double Element(const char* data, size_t i, DLDataType dtype) {
  if (dtype.code == kDLFloat && dtype.bits == 64) return As<double>(data, i);
  if (dtype.code == kDLFloat && dtype.bits == 32) return As<float>(data, i);
  if (dtype.bits == 16 && dtype.code != kDLInt && dtype.code != kDLUInt) {
    uint16_t bits;
    std::memcpy(&bits, data + 2 * i, 2);
    if (dtype.code == kDLFloat) return HalfToDouble(bits);
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  bool wraps = dtype.code == kDLUInt || dtype.code == kDLBool;
  switch (dtype.bits) {
    case 8: return wraps ? As<uint8_t>(data, i) : As<int8_t>(data, i);
    case 16: return wraps ? As<uint16_t>(data, i) : As<int16_t>(data, i);
    case 32: return wraps ? As<uint32_t>(data, i) : As<int32_t>(data, i);
    default: return wraps ? As<uint64_t>(data, i) : As<int64_t>(data, i);
  }
}

// Largest error beside the largest value: far above rounding, far below a wrong kernel.
double Tolerance(DLDataType dtype) {
  if (dtype.code == kDLBfloat) return 5e-2;
  if (dtype.code != kDLFloat) return 0;
  return dtype.bits == 64 ? 1e-9 : dtype.bits == 32 ? 1e-4 : 1e-2;
}

bool Agrees(const std::string& name, const std::vector<char>& got, DLDataType dtype,
            const Stored& want) {
  size_t count = got.size() / ((dtype.bits + 7) / 8);
  double error = 0, scale = 0;
  bool misplaced = false;
  for (size_t i = 0; i < count; ++i) {
    double a = Element(got.data(), i, dtype), b = Element(want.data, i, want.dtype);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      misplaced |= !(a == b || (std::isnan(a) && std::isnan(b)));
      continue;
    }
    error = std::max(error, std::fabs(a - b));
    scale = std::max(scale, std::fabs(b));
  }
  bool ok = !misplaced && error <= Tolerance(dtype) * scale;
  std::printf("%s: %zu values, largest error %.3g beside values up to %.3g: %s\n", name.c_str(),
              count, error, scale, ok ? "ok" : misplaced ? "NaN or Inf out of place" : "WRONG");
  return ok;
}

// TVM's runtime for CUDA is a library of its own, and needs libcudart.
void LoadCuda() {
  for (const char* name : {"libcudart.so.13", "libtvm_runtime_cuda.so"}) {
    if (dlopen(name, RTLD_NOW | RTLD_GLOBAL) == nullptr) Fail(dlerror());
  }
}

int Run(const std::string& path, const std::string& sample_path, int calls) {
  json manifest = ReadManifest(path), target = Get<json>(manifest, "target");
  json signature = Get<json>(manifest, "signature");
  bool cuda = Get<ffi::String>(target, "kind") == "cuda";
  if (cuda) LoadCuda();
  DLDevice device{cuda ? kDLCUDA : kDLCPU, 0};

  // The virtual machine: of the code, for a device, with a pooled allocator (2); a GPU's library
  // computes shapes on the host, so that it has two devices.
  std::string file = path.find('/') == std::string::npos ? "./" + path : path;  // no search
  ffi::Module code = ffi::Module::LoadFromFile(file);
  ffi::Module vm = code->GetFunction("vm_load_executable", true).value()().cast<ffi::Module>();
  ffi::Function initialize = vm->GetFunction("vm_initialization").value();
  if (cuda) {
    initialize(static_cast<int>(kDLCUDA), 0, 2, static_cast<int>(kDLCPU), 0, 2);
  } else {
    initialize(static_cast<int>(kDLCPU), 0, 2);
  }
  ffi::Function main = vm->GetFunction("main").value();

  // main takes the inputs, large weights from the file beside the library, and the outputs.
  Safetensors sample(sample_path);
  std::vector<ffi::Tensor> tensors;
  std::vector<std::string> outputs;
  for (json spec : Get<ffi::Array<json>>(signature, "inputs")) {
    Stored stored = sample.Find(Get<ffi::String>(spec, "name"));
    tensors.push_back(Upload(stored, DTypeIn(spec), device));
  }
  if (auto weights = Get<ffi::Optional<json>>(manifest, "weights")) {
    std::string folder = path.substr(0, path.find_last_of('/') + 1);
    Safetensors stored(folder + std::string(Get<ffi::String>(*weights, "file")));
    for (const ffi::String& name : Get<ffi::Array<ffi::String>>(*weights, "names")) {
      Stored weight = stored.Find(name);
      tensors.push_back(Upload(weight, weight.dtype, device));
    }
  }
  size_t first_output = tensors.size();
  std::vector<Stored> expected;
  for (json spec : Get<ffi::Array<json>>(signature, "outputs")) {
    outputs.push_back(Get<ffi::String>(spec, "name"));
    expected.push_back(sample.Find(outputs.back()));
    tensors.push_back(Empty(expected.back().shape, DTypeIn(spec), device));
  }
  std::vector<ffi::AnyView> args(tensors.begin(), tensors.end());
  auto call = [&] {
    ffi::Any result;
    main.CallPacked(args.data(), static_cast<int32_t>(args.size()), &result);
  };

  call();
  bool ok = true;
  for (size_t i = 0; i < expected.size(); ++i) {
    const ffi::Tensor& tensor = tensors[first_output + i];
    ok &= Agrees(outputs[i], Download(tensor, expected[i].shape), tensor.dtype(), expected[i]);
  }
  using Clock = std::chrono::steady_clock;
  std::vector<double> micros;
  auto synchronize = Global("runtime.Device_StreamSync");
  for (int i = 0; i < calls; ++i) {
    auto start = Clock::now();
    call();
    if (cuda) synchronize(device, static_cast<int64_t>(0));
    micros.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  if (!micros.empty()) {
    std::nth_element(micros.begin(), micros.begin() + micros.size() / 2, micros.end());
    std::printf("%d calls, median %.1f us\n", calls, micros[micros.size() / 2]);
  }
  return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s block.so sample.safetensors [calls]\n", argv[0]);
    return 2;
  }
  try {
    return Run(argv[1], argv[2], argc > 3 ? std::atoi(argv[3]) : 100);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
