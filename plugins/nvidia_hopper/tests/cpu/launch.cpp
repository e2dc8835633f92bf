// `attend.cu`, launched on a CPU: the compiler finds `ptx.cuh` beside this file.
#include <attend.cu>

typedef decltype(&packed_bf16) Kernel;

// Blocks of a grid, cluster by cluster. What went wrong; nothing where all is well.
template <class... Arguments> const char* launched(Kernel kernel, int seed, Index grid, Arguments... arguments) {
  machine::grid = grid, machine::failed.clear(), machine::chance.seed(seed);
  machine::body = [=] { kernel(arguments...); };
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y) machine::run_cluster(grid.x, {0, y, z});
  return machine::failed.c_str();
}

template <class> struct Signature;
template <class... Arguments> struct Signature<void (*)(Arguments...)> {
  static const char* launch(const char* name, int seed, int x, int y, int z, Arguments... arguments) {
    static const std::map<std::string, Kernel> kernels = {
        {"packed_bf16", packed_bf16}, {"codes_bf16", codes_bf16}, {"wide_bf16", wide_bf16}};
    return launched(kernels.at(name), seed, {x, y, z}, arguments...);
  }
};
extern "C" {
extern const void* const launch;
const void* const launch = (const void*)&Signature<Kernel>::launch;
}
