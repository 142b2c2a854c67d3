// A CUDA driver that runs nothing and writes down what it was asked for, in words of test_launch.py.
// Loaded as libcuda.so.1: what cuda.bindings hands to a driver is seen without a GPU.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int cuDriverGetVersion(int* version) { return *version = 13000, 0; }

int cuLibraryLoadData(void** library, const char* code, void* a, void* b, unsigned n, void* c,
                      void* d, unsigned m) {
    printf("load %s options=%u,%u\n", code[0] == '\x7f' ? "ELF" : code, n, m);
    return *library = (void*)0x1111, strstr(code, "refuse me") ? 218 : 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
    printf("kernel %s of %p\n", name, library);
    return *kernel = (void*)0x2222, 0;
}

int cuGetErrorString(int error, const char** text) { return *text = "a PTX JIT failed", 0; }

int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** arguments, void** extra) {
    printf("launch %p grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p extra=%d", kernel, gx, gy,
           gz, bx, by, bz, shared, stream, extra != 0);
    printf(" first=%lld last=%lld arguments=", *(long long*)arguments[1], *(long long*)arguments[2]);
    for (int i = 0; i < 24; i++) printf("%02x", ((unsigned char*)arguments[0])[i]);
    printf("\n");
    return 0;
}

static int absent(void) { return 500; }

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        int* status) {
    void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void* found = self ? dlsym(self, name) : 0;
    *function = found ? found : (void*)absent;
    if (status) *status = 0;
    return 0;
}
