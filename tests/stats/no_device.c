/* A libcuda without a device: what Triton's launcher, in C, calls. Each launch is printed with its parameters. */
#include <cuda.h>
#include <stdio.h>
#undef cuDevicePrimaryCtxRetain

static CUcontext here = (CUcontext)1;

CUresult cuCtxGetCurrent(CUcontext *context) { *context = here; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = here; return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) { *value = 1 << 17; return 0; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return 0; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)7;
  return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "no device"; return 0; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return 0;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }

/* The row kernel has 11 parameters of 64 bits each. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  printf("launch %u %u %u %u %ld %ld", config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
         (long)config->hStream, (long)function);
  for (int i = 0; i < 11; i++) printf(" %ld", *(long *)parameters[i]);
  printf("\n");
  fflush(stdout);
  return 0;
}
