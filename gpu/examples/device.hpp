// The few functions of NVIDIA's driver and of its run-time compiler that the example needs, opened when it runs: building
// it takes neither a GPU nor CUDA.  An engine has these already.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace device {

// A shared library, the first of some names that can be opened.
class Library {
public:
    Library(std::initializer_list<std::string> names, const char* what) {
        for (const std::string& name : names)
            if (!handle_) handle_ = dlopen(name.c_str(), RTLD_NOW);
        if (!handle_) throw std::runtime_error(std::string("there is no ") + what);
    }
    // The result of a call; other than 0 raises.
    template <class... Arguments>
    void call(const char* name, Arguments... arguments) const {
        void* found = dlsym(handle_, name);
        if (!found) throw std::runtime_error(std::string("no function ") + name);
        const int result = reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
        if (result) throw std::runtime_error(std::string(name) + " failed with " + std::to_string(result));
    }

private:
    void* handle_ = nullptr;
};

// Machine code of `source`, by NVRTC; `options` name the architecture.
inline std::string compile(const std::string& source, const std::vector<std::string>& options) {
    const Library library({"libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"}, "NVRTC");
    std::vector<const char*> arguments;
    for (const std::string& option : options) arguments.push_back(option.c_str());
    void* program = nullptr;
    library.call("nvrtcCreateProgram", &program, source.c_str(), "attend.cu", 0, (const char**)nullptr, (const char**)nullptr);
    std::size_t size = 0;
    try {
        library.call("nvrtcCompileProgram", program, (int)arguments.size(), arguments.data());
    } catch (const std::runtime_error& failed) {
        library.call("nvrtcGetProgramLogSize", program, &size);
        std::string log(size, '\0');
        library.call("nvrtcGetProgramLog", program, &log[0]);
        throw std::runtime_error(std::string(failed.what()) + "\n" + log);
    }
    library.call("nvrtcGetCUBINSize", program, &size);
    std::string code(size, '\0');
    library.call("nvrtcGetCUBIN", program, &code[0]);
    library.call("nvrtcDestroyProgram", &program);
    return code;
}

typedef std::uint64_t Address;

// Device 0 and its memory.
class Device {
public:
    explicit Device(const std::string& driver) : driver_({driver}, "NVIDIA driver") {
        driver_.call("cuInit", 0u);
        int device = 0;
        driver_.call("cuDeviceGet", &device, 0);
        void* context = nullptr;
        driver_.call("cuDevicePrimaryCtxRetain", &context, device);
        driver_.call("cuCtxSetCurrent", context);
        const auto attribute = [&](int number) {
            int value = 0;
            driver_.call("cuDeviceGetAttribute", &value, number, device);
            return value;
        };
        multiprocessors = attribute(16);
        architecture = "sm_" + std::to_string(attribute(75)) + std::to_string(attribute(76));
        block_shared_bytes = attribute(97);
    }

    int multiprocessors = 0, block_shared_bytes = 0;
    std::string architecture;

    Address allocate(std::size_t bytes) const {
        Address found = 0;
        driver_.call("cuMemAlloc_v2", &found, bytes ? bytes : 1);
        return found;
    }
    template <class T>
    Address put(const std::vector<T>& values) const {
        const Address found = allocate(values.size() * sizeof(T));
        driver_.call("cuMemcpyHtoD_v2", found, (const void*)values.data(), values.size() * sizeof(T));
        return found;
    }
    template <class T>
    std::vector<T> get(Address from, std::size_t count) const {
        std::vector<T> values(count);
        driver_.call("cuMemcpyDtoH_v2", (void*)values.data(), from, count * sizeof(T));
        return values;
    }

    void* load(const std::string& code) const {
        void* module = nullptr;
        driver_.call("cuModuleLoadData", &module, (const void*)code.data());
        return module;
    }
    void* function(void* module, const char* name, int shared_bytes) const {
        void* found = nullptr;
        driver_.call("cuModuleGetFunction", &found, module, name);
        driver_.call("cuFuncSetAttribute", found, 8, shared_bytes);  // more than 48 KB must be asked for
        return found;
    }
    Address global(void* module, const char* name) const {
        Address found = 0;
        std::size_t bytes = 0;
        driver_.call("cuModuleGetGlobal_v2", &found, &bytes, module, name);
        return found;
    }
    // On the default stream; the bytes of `parameters` are copied before this returns.
    void launch(void* function, int blocks, int threads, int shared_bytes, const std::vector<std::uint8_t>& parameters) const {
        const void* arguments[] = {parameters.data()};
        driver_.call("cuLaunchKernel", function, (unsigned)blocks, 1u, 1u, (unsigned)threads, 1u, 1u, (unsigned)shared_bytes,
                     (void*)nullptr, (const void**)arguments, (void**)nullptr);
    }
    void wait() const { driver_.call("cuCtxSynchronize"); }

private:
    Library driver_;
};

}  // namespace device
