// The drivers of both vendors as far as twinrun_mamba calls them, to see what they are asked for where there is no GPU:
// launches are written to `launched`, and nothing runs.
#include <stdint.h>
#include <string.h>

typedef struct {
  unsigned sizes[7];
  void* stream;
  void* attributes;
  unsigned count;
} Config;

struct {
  int64_t function, context, stream, overlaps;
  int64_t sizes[7];
  int64_t fields[7];
} launched;
int status, launches;
static void *current, *entered[8];
static int depth;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)0x7e57c0ffee, 0; }
int cuCtxPushCurrent_v2(void* context) { return entered[depth++] = current, current = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, current = entered[--depth], 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuModuleLoadData(void** module, const void* image) { return *module = (void*)1, 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return *function = (void*)strlen(name), 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuGetErrorString(int code, const char** text) { return *text = "refused by the stub", 0; }

static int launch(void* function, const unsigned* sizes, void* stream, void** params, int overlaps) {
  launches++;
  launched.function = (int64_t)function;
  launched.context = (int64_t)current;
  launched.stream = (int64_t)stream;
  launched.overlaps = overlaps;
  for (int i = 0; i < 7; ++i) launched.sizes[i] = sizes[i];
  memcpy(launched.fields, params[0], 7 * 8);
  return status;
}

int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  const unsigned sizes[7] = {gx, gy, gz, bx, by, bz, shared};
  return launch(f, sizes, stream, params, 0);
}

int cuLaunchKernelEx(const Config* config, void* f, void** params, void** extra) {
  const int* attribute = config->attributes;
  const int asked = config->count == 1 && attribute[0] == 6 && attribute[2] == 1;
  return launch(f, config->sizes, config->stream, params, asked ? 1 : -1);
}

int hipModuleLoadData(void** module, const void* image) { return cuModuleLoadData(module, image); }
int hipModuleGetFunction(void** function, void* module, const char* name) {
  return cuModuleGetFunction(function, module, name);
}
const char* hipGetErrorString(int code) { return "refused by the stub"; }
int hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** params, void** extra) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}
