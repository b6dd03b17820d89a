// numpy arrays in and out of the nanobind module. bfloat16 arrays cross as
// their bits, because they export no buffer of their own.
#ifndef NEOJAX_CPU_PAGED_ATTN_NUMPY_ARRAYS_H_
#define NEOJAX_CPU_PAGED_ATTN_NUMPY_ARRAYS_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi/cpu_paged_attn/dtype.h"

namespace neojax {

namespace nb = nanobind;

using Ints1 =
    nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 =
    nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

inline Dtype ParseDtype(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  if (name == "float16") return Dtype::kFloat16;
  throw std::invalid_argument(
      "dtype must be float32, bfloat16 or float16, got " + name);
}

inline std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return out + "]";
}

// A numpy array of floats; keeps what it points into alive.
class Floats {
 public:
  Floats(const char* name, nb::handle object) {
    nb::object array = nb::borrow(object);
    std::string type = nb::cast<std::string>(nb::str(nb::getattr(
        nb::getattr(array, "dtype", nb::none()), "name", nb::str("no array"))));
    if (type == "float32") {
      dtype_ = Dtype::kFloat32;
    } else if (type == "float16") {
      dtype_ = Dtype::kFloat16;
    } else if (type == "bfloat16") {
      dtype_ = Dtype::kBFloat16;
      array = array.attr("view")("uint16");
    } else {
      throw std::invalid_argument(
          std::string(name) + " must be float32, bfloat16 or float16, got " +
          type);
    }
    if (!nb::try_cast(array, array_)) {
      throw std::invalid_argument(std::string(name) +
                                  " must be C-contiguous, in host memory");
    }
    const std::string error =
        CheckAligned(name, array_.data(), ElementSize(dtype_));
    if (!error.empty()) throw std::invalid_argument(error);
    for (size_t i = 0; i < array_.ndim(); ++i) {
      shape_.push_back(static_cast<int64_t>(array_.shape(i)));
    }
  }
  void CheckShape(const char* name, const char* letters,
                  const std::vector<int64_t>& want) const {
    if (shape_ == want) return;
    throw std::invalid_argument(std::string(name) + " must be " + letters +
                                " = " + ShapeText(want) + ", got " +
                                ShapeText(shape_));
  }
  const void* data() const { return array_.data(); }
  Dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }

 private:
  AnyArray array_;
  Dtype dtype_;
  std::vector<int64_t> shape_;
};

// A new, uninitialised numpy array and where it lies.
struct NewArray {
  nb::object object;
  void* data;
};

inline NewArray MakeArray(Dtype dtype, const std::vector<int64_t>& shape) {
  nb::module_ numpy = nb::module_::import_("numpy");
  nb::list dims;
  for (int64_t dim : shape) dims.append(dim);
  const char* type = dtype == Dtype::kBFloat16 ? "uint16" : DtypeName(dtype);
  nb::object array = numpy.attr("empty")(nb::tuple(dims), type);
  auto view = nb::cast<nb::ndarray<nb::c_contig, nb::device::cpu>>(array);
  void* data = view.data();
  if (dtype == Dtype::kBFloat16) {
    array =
        array.attr("view")(nb::module_::import_("ml_dtypes").attr("bfloat16"));
  }
  return {array, data};
}

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_NUMPY_ARRAYS_H_
