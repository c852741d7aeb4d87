/* Makes a disk fail on demand: preloaded into a server, it refuses reads, writes or syncs of files whose path contains
 * FAULT_PATH for as long as the file FAULT_TRIGGER exists. The trigger's text names the calls: "read", "write", "sync";
 * "slow" lets every other sync take 40 ms instead, "hold" lets none end; "count" writes a dot beside the trigger for each
 * sync; "die" writes the first half and kills the process there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, name))

static int fails(int fd, const char *call)
{
    const char *pattern = getenv("FAULT_PATH"), *trigger = getenv("FAULT_TRIGGER");
    char link[64], path[4096], calls[64] = "";
    if (!pattern || !trigger)
        return 0;
    int kept = errno, asked = open(trigger, O_RDONLY | O_CLOEXEC);
    if (asked < 0) {
        errno = kept;
        return 0;
    }
    ssize_t length = REAL("read", ssize_t(*)(int, void *, size_t))(asked, calls, sizeof calls - 1);
    close(asked);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (size < 0 || length < 0)
        return 0;
    path[size] = 0;
    if (!strstr(path, pattern) || !strstr(calls, call))
        return 0;
    errno = EIO;
    return 1;
}

static void note(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.count", getenv("FAULT_TRIGGER"));
    FILE *file = fopen(path, "ae");
    if (file) {
        fputc('.', file);
        fclose(file);
    }
}

static void dawdle(int fd)
{
    static int turn;
    if (fails(fd, "slow") && turn++ % 2 == 0)
        usleep(40000);
    while (fails(fd, "hold"))
        usleep(1000);
    if (fails(fd, "count"))
        note();
}

ssize_t read(int fd, void *into, size_t size)
{
    return fails(fd, "read") ? -1 : REAL("read", ssize_t(*)(int, void *, size_t))(fd, into, size);
}

ssize_t pread64(int fd, void *into, size_t size, off64_t at)
{
    return fails(fd, "read") ? -1 : REAL("pread64", ssize_t(*)(int, void *, size_t, off64_t))(fd, into, size, at);
}

ssize_t write(int fd, const void *from, size_t size)
{
    if (fails(fd, "die")) {
        REAL("write", ssize_t(*)(int, const void *, size_t))(fd, from, size / 2);
        kill(getpid(), SIGKILL);
    }
    return fails(fd, "write") ? -1 : REAL("write", ssize_t(*)(int, const void *, size_t))(fd, from, size);
}

ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at)
{
    if (fails(fd, "die")) {
        REAL("pwrite64", ssize_t(*)(int, const void *, size_t, off64_t))(fd, from, size / 2, at);
        kill(getpid(), SIGKILL);
    }
    return fails(fd, "write") ? -1 : REAL("pwrite64", ssize_t(*)(int, const void *, size_t, off64_t))(fd, from, size, at);
}

int ftruncate64(int fd, off64_t size)
{
    return fails(fd, "write") ? -1 : REAL("ftruncate64", int (*)(int, off64_t))(fd, size);
}

int fdatasync(int fd)
{
    dawdle(fd);
    return fails(fd, "sync") ? -1 : REAL("fdatasync", int (*)(int))(fd);
}

int fsync(int fd)
{
    return fails(fd, "sync") ? -1 : REAL("fsync", int (*)(int))(fd);
}
