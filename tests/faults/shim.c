/* A disk that keeps only what was synced, and a heap that runs out when told: loaded before libc.

Below DISK_ROOT each fsync leaves a copy in DISK_SHADOW, named by inode: the bytes of a file, or
the entries of a directory. DISK_ROOT has to be on a tmpfs, which never uses an inode number twice.
With DISK_FORGETS_NAMES the disk lies: it answers to the sync of a directory and does nothing.
*/
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void list_entries(const char *directory, FILE *target) {
    DIR *entries = opendir(directory);
    struct dirent *entry;
    while (entries && (entry = readdir(entries)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            fprintf(target, "%lu %d %s\n", (unsigned long)entry->d_ino, entry->d_type == DT_DIR,
                    entry->d_name);
    if (entries)
        closedir(entries);
}

static void copy_bytes(const char *path, FILE *target) {
    char block[65536];
    ssize_t num_bytes;
    int source = open(path, O_RDONLY | O_CLOEXEC);
    while (source >= 0 && (num_bytes = read(source, block, sizeof block)) > 0)
        fwrite(block, 1, num_bytes, target);
    close(source);
}

static void keep(int descriptor) {
    const char *root = getenv("DISK_ROOT"), *shadow = getenv("DISK_SHADOW");
    char opened[64], path[4096], kept[4096], partial[4200];
    struct stat found;
    snprintf(opened, sizeof opened, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(opened, path, sizeof path - 1);
    if (!root || !shadow || length < 0 || strncmp(path, root, strlen(root)))
        return;
    fstat(descriptor, &found);
    if (S_ISDIR(found.st_mode) && getenv("DISK_FORGETS_NAMES"))
        return;
    snprintf(kept, sizeof kept, "%s/%lu", shadow, (unsigned long)found.st_ino);
    snprintf(partial, sizeof partial, "%s.%d.%d", kept, getpid(), gettid());
    FILE *target = fopen(partial, "we");
    if (S_ISDIR(found.st_mode))
        list_entries(opened, target);
    else
        copy_bytes(opened, target);
    fclose(target);
    rename(partial, kept);
}

int fsync(int descriptor) {
    int (*sync)(int) = dlsym(RTLD_NEXT, "fsync");
    int result = sync(descriptor);
    if (result == 0)
        keep(descriptor);
    return result;
}

int fdatasync(int descriptor) {
    return fsync(descriptor);
}

/* Allocations of at least LARGE bytes are counted; one, or each from it on, fails. */
enum { LARGE = 16384 };
static atomic_long num_seen, failing_number;
static atomic_int lasts;

/* Let the allocation of this number fail from now on, none for 0; return how many were seen. */
long fail_allocation(long number, int is_lasting) {
    long seen = num_seen;
    failing_number = 0;
    num_seen = 0;
    lasts = is_lasting;
    failing_number = number;
    return seen;
}

static int fails(size_t num_bytes) {
    if (num_bytes < LARGE)
        return 0;
    long number = ++num_seen;
    if (!failing_number || (lasts ? number < failing_number : number != failing_number))
        return 0;
    errno = ENOMEM;
    return 1;
}

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t num_bytes) {
    return fails(num_bytes) ? NULL : __libc_malloc(num_bytes);
}

void *calloc(size_t count, size_t num_bytes) {
    return fails(count * num_bytes) ? NULL : __libc_calloc(count, num_bytes);
}

void *realloc(void *block, size_t num_bytes) {
    return fails(num_bytes) ? NULL : __libc_realloc(block, num_bytes);
}

void *aligned_alloc(size_t alignment, size_t num_bytes) {
    return fails(num_bytes) ? NULL : __libc_memalign(alignment, num_bytes);
}

int posix_memalign(void **block, size_t alignment, size_t num_bytes) {
    if (fails(num_bytes))
        return ENOMEM;
    *block = __libc_memalign(alignment, num_bytes);
    return *block ? 0 : ENOMEM;
}

void *mmap(void *place, size_t num_bytes, int protection, int flags, int file, off_t offset) {
    if ((flags & MAP_ANONYMOUS) && fails(num_bytes))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, place, num_bytes, protection, flags, file, offset);
}
