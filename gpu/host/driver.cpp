// A driver without a GPU, just enough to run gpu/examples/attend.cpp in tests: its calls as a library, memory that of
// this process, and kernels those of DQ_KERNELS, attend.cpp or attend_groups.cpp beside this, compiled for one plan and
// blocks of one warp.
#include <cstdlib>
#include <cstring>

#include DQ_KERNELS

namespace {
int numbers[6] = {
    Shape::threads,  Shape::shared_bytes,   Shape::groups, Shape::passes * Shape::rows / 4,
    Shape::partial_floats, Shape::state_floats,
};
}

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { return *device = 0; }
int cuDevicePrimaryCtxRetain(void**, int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() { return 0; }
int cuDeviceGetAttribute(int* value, int number, int) {
    *value = number == 16 ? 3 : number == 75 ? 9 : number == 76 ? 0 : 227 * 1024;
    return 0;
}
int cuMemAlloc_v2(unsigned long long* at, size_t bytes) {
    // As aligned as a device's memory, and as full of what was there before.
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(memory, 0xFF, bytes);
    *at = (unsigned long long)memory;
    return 0;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) { return std::memcpy((void*)to, from, bytes), 0; }
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) { return std::memcpy(to, (void*)from, bytes), 0; }
int cuModuleLoadData(void**, const void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) { return *function = (void*)name, 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuModuleGetGlobal_v2(unsigned long long* at, size_t* bytes, void*, const char*) {
    *at = (unsigned long long)numbers;
    *bytes = sizeof numbers;
    return 0;
}
int cuLaunchKernel(
    void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned shared_bytes, void*,
    void** arguments, void**
) {
    const Constants::Params& p = *(const Constants::Params*)arguments[0];
    if (std::strcmp((const char*)function, "attend_pages") == 0)
        dquant_simt::launch((int)blocks, (int)threads, shared_bytes, [&] { attend_pages(p); });
    else
        dquant_simt::launch((int)blocks, (int)threads, 16, [&] { attend_finish(p); });
    return 0;
}
}
