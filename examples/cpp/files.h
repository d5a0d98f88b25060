// What the program reads: a library's manifest, and tensors of safetensors files.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
using json = ffi::json::Object;

[[noreturn]] inline void Fail(const std::string& message) { throw std::runtime_error(message); }

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Fail(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline uint64_t LittleEndian(const char* bytes) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

template <typename T>
T Get(const json& object, const char* key) {
  auto found = object.find(ffi::String(key));
  if (found == object.end()) Fail(std::string("no field ") + key);
  return (*found).second.cast<T>();
}

inline json ParseObject(const std::string& text) {
  return ffi::json::Parse(ffi::String(text)).cast<json>();
}

// The manifest is the tail of the library: [ELF][JSON][magic, length of JSON, of ELF, sha256].
inline json ReadManifest(const std::string& path) {
  constexpr size_t kFooter = 56;
  std::string data = ReadFile(path);
  if (data.size() < kFooter) Fail(path + ": no tvmcap library");
  const char* footer = data.data() + data.size() - kFooter;
  if (std::memcmp(footer, "tvmcap\0\1", 8) != 0) Fail(path + ": no tvmcap library, or a cut one");
  uint64_t text = LittleEndian(footer + 8), elf = LittleEndian(footer + 16);
  if (text + elf + kFooter != data.size()) Fail(path + ": truncated or extended");
  return ParseObject(data.substr(elf, text));
}

// A tensor of a safetensors file: [length of header][header, JSON][data].
struct Stored {
  DLDataType dtype;
  std::vector<int64_t> shape;
  const char* data;
  size_t size;
};

inline DLDataType DTypeOf(const std::string& name) {
  if (name == "BOOL") return {kDLBool, 8, 1};
  if (name == "BF16") return {kDLBfloat, 16, 1};
  auto code = name[0] == 'F' ? kDLFloat : name[0] == 'U' ? kDLUInt : kDLInt;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(std::stoi(name.substr(1))), 1};
}

class Safetensors {
 public:
  explicit Safetensors(const std::string& path) : path_(path), data_(ReadFile(path)) {
    if (data_.size() < 8 || LittleEndian(data_.data()) > data_.size() - 8) {
      Fail(path + ": no safetensors file");
    }
    start_ = 8 + LittleEndian(data_.data());
    header_ = ParseObject(data_.substr(8, start_ - 8));
  }

  Stored Find(const std::string& name) const {
    json entry = Get<json>(header_, name.c_str());
    auto offsets = Get<ffi::Array<int64_t>>(entry, "data_offsets");
    std::vector<int64_t> shape;
    for (int64_t extent : Get<ffi::Array<int64_t>>(entry, "shape")) shape.push_back(extent);
    if (offsets[0] < 0 || offsets[1] < offsets[0] || start_ + offsets[1] > data_.size()) {
      Fail(path_ + ": " + name + " is cut off");
    }
    DLDataType dtype = DTypeOf(Get<ffi::String>(entry, "dtype"));
    int64_t size = (dtype.bits + 7) / 8;
    for (int64_t extent : shape) size *= extent;
    if (size != offsets[1] - offsets[0]) Fail(path_ + ": " + name + " does not fit its shape");
    return {dtype, shape, data_.data() + start_ + offsets[0], static_cast<size_t>(size)};
  }

 private:
  std::string path_, data_;
  size_t start_;
  json header_;
};
