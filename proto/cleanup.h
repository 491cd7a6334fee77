/* Scope-bound release, so that an early return leaks nothing: `_cleanup_(free_charp) char *path = NULL;` */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define _cleanup_(function) __attribute__((cleanup(function)))

/* Hands a value out of a scope that would release it. */
#define take_pointer(variable)                                                                                         \
    __extension__({                                                                                                    \
        __typeof__(variable) taken_ = (variable);                                                                      \
        (variable) = NULL;                                                                                             \
        taken_;                                                                                                        \
    })
#define take_fd(variable)                                                                                              \
    __extension__({                                                                                                    \
        int taken_ = (variable);                                                                                       \
        (variable) = -1;                                                                                               \
        taken_;                                                                                                        \
    })

static inline void free_voidp(void *pointer)
{
    free(*(void **)pointer);
}

static inline void close_fdp(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

static inline void close_filep(FILE **file)
{
    if (*file)
        fclose(*file);
}

#define _cleanup_free_ _cleanup_(free_voidp)
#define _cleanup_close_ _cleanup_(close_fdp)
#define _cleanup_fclose_ _cleanup_(close_filep)
