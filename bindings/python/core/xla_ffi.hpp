// The parts of XLA's foreign-function interface that a handler reads: its C ABI, major version 0. Every
// struct begins with its size and a list of extensions, so later versions add fields at the end. Functions
// not called here are void pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::python::xla {

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct Version {
  size_t struct_size;
  Extension* extensions;
  int32_t major, minor;
};

/// Asked for once, when a handler is registered: a call frame with this extension is no call.
struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
  int64_t state_type;  // since 0.2
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Error;
struct Context;
enum ErrorCode : int32_t {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13
};

enum DataType : int32_t {
  kBool = 1,
  kInt32 = 4,
  kInt64 = 5,
  kUint8 = 6,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kBfloat16 = 16,
  kFloat8E4M3FN = 20
};

struct Buffer {  // row-major
  size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* shape;
};

struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;  // 1: a Buffer
  void** items;
};

struct Text {
  const char* data;
  size_t size;
};
struct ArrayAttribute {
  DataType dtype;
  size_t size;
  void* data;
};
enum AttributeType : int32_t { kArrayAttribute = 1, kTextAttribute = 4 };

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  AttributeType* types;
  Text** names;
  void** items;
};

struct ErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};
struct StreamArguments {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};
struct DeviceArguments {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int32_t device;  // out
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArguments*);
  void* before_stream[3];
  Error* (*stream)(StreamArguments*);
  void* before_device[12];
  Error* (*device)(DeviceArguments*);  // since 0.2
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int32_t stage;
  Buffers arguments, results;
  Attributes attributes;
};

}  // namespace fovea::python::xla
