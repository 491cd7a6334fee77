#include "cmd/verify/hashers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

struct hasher {
    struct hashers *all;
    pthread_t thread;
    pthread_cond_t work;
    struct chunk *first, *last; /* to do, in order */
    /* the thread's own: the part that is being hashed, and the first thing that was wrong with it */
    XXH3_state_t *state;
    uint32_t part, end; /* end: of the extent's parts */
    int code;
};

struct hashers {
    const struct extents *extents;
    int doorbell_fd;
    pthread_mutex_t mutex;
    struct chunk *done;
    bool closing;
    int *codes; /* [parts] W: the thread of the extent, R: who collected its last chunk */
    uint32_t count, running;
    struct hasher *list;
};

/* Takes the bytes of the file from `at` to `end`: into the checksum, or as missing for the reason `code`. */
static void take_bytes(struct hasher *hasher, const char *data, uint64_t at, uint64_t end, int code)
{
    while (hasher->part < hasher->end) {
        const struct part *part = &hasher->all->extents->parts[hasher->part];
        uint64_t part_end = part->offset + part->bytes;
        uint64_t from = at > part->offset ? at : part->offset, to = end < part_end ? end : part_end;
        if (from < to && code)
            hasher->code = hasher->code ? hasher->code : code;
        else if (from < to)
            XXH3_64bits_update(hasher->state, data + (from - at), to - from);
        if (end < part_end)
            return;
        if (!hasher->code && XXH3_64bits_digest(hasher->state) != part->expected)
            hasher->code = EBADMSG;
        hasher->all->codes[hasher->part++] = hasher->code;
        hasher->code = 0;
        XXH3_64bits_reset(hasher->state);
    }
}

static void hash_chunk(struct hasher *hasher, const struct chunk *chunk)
{
    const struct extent *extent = &hasher->all->extents->list[chunk->extent];
    uint64_t at = chunk->offset;
    if (chunk->first) {
        hasher->part = extent->first;
        hasher->end = extent->first + extent->parts;
        hasher->code = 0;
        XXH3_64bits_reset(hasher->state);
    }
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const struct piece *piece = &chunk->pieces[i];
        uint64_t end = chunk->piece_end[i], good = piece->status < 0 ? piece->read.offset : end;
        const char *data = chunk->memory + (at - chunk->offset);
        take_bytes(hasher, data, at, good, 0);
        if (good < end)
            take_bytes(hasher, NULL, good, end, -piece->status);
        at = end;
    }
    if (chunk->last) /* parts without bytes at the end */
        take_bytes(hasher, NULL, extent->end, extent->end, 0);
}

static void *hasher_thread(void *argument)
{
    struct hasher *hasher = argument;
    struct hashers *all = hasher->all;
    pthread_mutex_lock(&all->mutex);
    while (true) {
        while (!hasher->first && !all->closing)
            pthread_cond_wait(&hasher->work, &all->mutex);
        if (all->closing)
            break;
        struct chunk *chunk = hasher->first;
        hasher->first = chunk->next;
        pthread_mutex_unlock(&all->mutex);
        hash_chunk(hasher, chunk);
        pthread_mutex_lock(&all->mutex);
        if (!all->done) {
            uint64_t one = 1;
            (void)!write(all->doorbell_fd, &one, sizeof(one)); /* full: it rings already */
        }
        chunk->next = all->done;
        all->done = chunk;
    }
    pthread_mutex_unlock(&all->mutex);
    return NULL;
}

int hashers_open(const struct extents *extents, uint32_t count, int doorbell_fd, struct hashers **ret_hashers,
                 struct error *ret_error)
{
    struct hashers *all = calloc(1, sizeof *all);
    if (!all)
        return error_set(ret_error, ENOMEM, "no memory for the hashing threads");
    *all = (struct hashers){.extents = extents,
                            .doorbell_fd = doorbell_fd,
                            .count = count,
                            .list = calloc(count, sizeof *all->list),
                            .codes = calloc(extents->part_count + 1u, sizeof *all->codes)};
    pthread_mutex_init(&all->mutex, NULL);
    int code = all->list && all->codes ? 0 : ENOMEM;
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        struct hasher *hasher = &all->list[i];
        hasher->all = all;
        hasher->state = XXH3_createState();
        pthread_cond_init(&hasher->work, NULL);
        code = hasher->state ? pthread_create(&hasher->thread, NULL, hasher_thread, hasher) : ENOMEM;
        if (code == 0)
            all->running++;
        else
            XXH3_freeState(hasher->state);
    }
    if (code) {
        hashers_close(all);
        return error_set(ret_error, code, "hashing threads cannot be started: %s; try fewer with --jobs",
                         strerror(code));
    }
    *ret_hashers = all;
    return 0;
}

void hashers_add(struct hashers *hashers, struct chunk *chunk)
{
    struct hasher *hasher = &hashers->list[chunk->extent % hashers->count];
    chunk->next = NULL;
    pthread_mutex_lock(&hashers->mutex);
    if (hasher->first)
        hasher->last->next = chunk;
    else
        hasher->first = chunk;
    hasher->last = chunk;
    pthread_cond_signal(&hasher->work);
    pthread_mutex_unlock(&hashers->mutex);
}

struct chunk *hashers_collect(struct hashers *hashers)
{
    pthread_mutex_lock(&hashers->mutex);
    struct chunk *done = hashers->done;
    hashers->done = NULL;
    pthread_mutex_unlock(&hashers->mutex);
    return done;
}

int hashers_code(const struct hashers *hashers, uint32_t part)
{
    return hashers->codes[part];
}

void hashers_close(struct hashers *hashers)
{
    if (!hashers)
        return;
    pthread_mutex_lock(&hashers->mutex);
    hashers->closing = true;
    for (uint32_t i = 0; i < hashers->running; i++)
        pthread_cond_signal(&hashers->list[i].work);
    pthread_mutex_unlock(&hashers->mutex);
    for (uint32_t i = 0; i < hashers->running; i++) {
        pthread_join(hashers->list[i].thread, NULL);
        pthread_cond_destroy(&hashers->list[i].work);
        XXH3_freeState(hashers->list[i].state);
    }
    pthread_mutex_destroy(&hashers->mutex);
    free(hashers->list);
    free(hashers->codes);
    free(hashers);
}
