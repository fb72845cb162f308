/* Memory: what a launch may touch. Host memory stands for that of a device; an address outside it must not end the test. */
#define _GNU_SOURCE
#include "fake.h"
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096
#define MOST 64

typedef struct {
    uint64_t begin, end;
    int writable;
} Buffer;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Buffer buffers[MOST];
static int count;

__attribute__((visibility("default"))) void fake_register(uint64_t address, uint64_t bytes, int writable) {
    pthread_mutex_lock(&lock);
    if (count < MOST)
        buffers[count++] = (Buffer){address, address + bytes, writable};
    pthread_mutex_unlock(&lock);
}

__attribute__((visibility("default"))) void fake_forget_all(void) {
    pthread_mutex_lock(&lock);
    count = 0;
    pthread_mutex_unlock(&lock);
}

/* Whether one byte is there: the kernel says so without a signal. */
static int there(uint64_t address, int written) {
    unsigned char byte;
    struct iovec here = {&byte, 1}, far = {(void *)(uintptr_t)address, 1};
    if (process_vm_readv(getpid(), &here, 1, &far, 1, 0) != 1)
        return 0;
    return !written || process_vm_writev(getpid(), &here, 1, &far, 1, 0) == 1;
}

int check_memory(const char *what, uint64_t address, uint64_t bytes, int written) {
    uint64_t at;
    int i, inside = 0;
    if (!bytes)
        return SUCCESS;
    if (!address || address + bytes < address)
        return refuse(ILLEGAL_ADDRESS, "%s, %llu bytes at %#llx", what, (unsigned long long)bytes, (unsigned long long)address);
    pthread_mutex_lock(&lock);
    for (i = 0; i < count; i++)
        inside |= address >= buffers[i].begin && address + bytes <= buffers[i].end && (buffers[i].writable || !written);
    inside |= !count;
    pthread_mutex_unlock(&lock);
    if (!inside)
        return refuse(ILLEGAL_ADDRESS, "%s, %llu bytes at %#llx, lies in no %sbuffer", what, (unsigned long long)bytes, (unsigned long long)address, written ? "writable " : "");
    for (at = address; at < address + bytes; at = (at / PAGE + 1) * PAGE)
        if (!there(at, written))
            return refuse(ILLEGAL_ADDRESS, "%s ends before %#llx", what, (unsigned long long)at);
    return there(address + bytes - 1, written) ? SUCCESS : refuse(ILLEGAL_ADDRESS, "%s ends before its last byte", what);
}
