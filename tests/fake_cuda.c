/* A CUDA driver without a device, for tests/first_launch.py: it says yes, writes a line for each launch and each tensor map, and
   refuses what the documentation of cuTensorMapEncodeTiled refuses. It must never be on the path of a program that has a GPU. */
#define _GNU_SOURCE
#include "cuda.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void note(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  vfprintf(log, format, arguments);
  fclose(log);
  va_end(arguments);
}

CUresult cuGetErrorString(CUresult error, const char **text) { *text = error == CUDA_SUCCESS ? "no error" : "invalid argument"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) { *clusters = 1; return CUDA_SUCCESS; }

/* A function's handle is its name. */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)strdup(name); return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 * 1024
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR        ? atoi(getenv("FAKE_CUDA_TARGET")) / 10
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR        ? 0
           : attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE                       ? 32
                                                                              : 1024;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) { *(CUdeviceptr *)data = pointer; return CUDA_SUCCESS; }

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
  *(CUdeviceptr *)data[0] = pointer;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  note("{\"launch\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %u}\n", (const char *)function, config->gridDimX,
       config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes);
  int fits = config->gridDimX >= 1 && config->gridDimX <= 2147483647u && config->gridDimY <= 65535 && config->gridDimZ <= 65535;
  return fits && config->blockDimX <= 1024 && config->sharedMemBytes <= 227 * 1024 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  unsigned item = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2, span = swizzle == 0 ? 0 : 16u << swizzle;
  note("{\"tensor_map\": [%llu, %llu], \"stride\": %llu, \"box\": [%u, %u], \"item\": %u, \"swizzle\": %u}\n",
       (unsigned long long)sizes[0], (unsigned long long)sizes[1], (unsigned long long)strides[0], box[0], box[1], item, span);
  int fits = (unsigned long long)address % 16 == 0 && rank == 2 && interleave == 0;
  for (unsigned i = 0; i < rank; i++) fits = fits && sizes[i] >= 1 && sizes[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
  for (unsigned i = 0; i + 1 < rank; i++) fits = fits && strides[i] % 16 == 0 && strides[i] < 1ull << 40;
  return fits && box[0] * item % 16 == 0 && (span == 0 || box[0] * item <= span) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
