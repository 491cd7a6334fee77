/* Channels against the real library, each side of each protocol. */
#include "proto/channel.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <nng/nng.h>
#include <nng/protocol/pair0/pair.h>
#include <nng/protocol/reqrep0/rep.h>
#include <nng/protocol/reqrep0/req.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BIG ((size_t)3 << 20)
#define ROUNDS 20

struct fixture {
    char folder[64], path[128], url[160];
    char *big;
};

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-nng-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    snprintf(fixture->path, sizeof fixture->path, "%s/socket", fixture->folder);
    snprintf(fixture->url, sizeof fixture->url, "ipc://%s", fixture->path);
    fixture->big = malloc(BIG);
    assert_non_null(fixture->big);
    for (size_t i = 0; i < BIG; i++)
        fixture->big[i] = (char)(i % 251);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    unlink(fixture->path);
    assert_int_equal(rmdir(fixture->folder), 0);
    free(fixture->big);
    free(fixture);
    return 0;
}

/* nng's own limit for a message is 1 MiB. */
static void prepare(nng_socket socket)
{
    assert_int_equal(nng_socket_set_size(socket, NNG_OPT_RECVMAXSZ, 2 * BIG), 0);
    assert_int_equal(nng_socket_set_ms(socket, NNG_OPT_RECVTIMEO, 10000), 0);
    assert_int_equal(nng_socket_set_ms(socket, NNG_OPT_SENDTIMEO, 10000), 0);
}

static void check_message(nng_msg *message, const char *bytes, size_t size)
{
    assert_int_equal(nng_msg_len(message), size);
    assert_memory_equal(nng_msg_body(message), bytes, size);
    nng_msg_free(message);
}

static void channel_expect(struct channel *channel, const char *bytes, size_t size)
{
    void *got;
    size_t got_size;
    struct error error;
    assert_int_equal(channel_receive(channel, 10000, &got, &got_size, &error), 0);
    assert_int_equal(got_size, size);
    assert_memory_equal(got, bytes, size);
    free(got);
}

/* Messages of 0 to BIG bytes there and back. */
static void talk_to_nng(struct fixture *fixture, struct channel *channel, nng_socket socket)
{
    struct error error;
    for (size_t round = 0; round < ROUNDS; round++) {
        size_t there = round % 2 ? round : BIG - round, back = round % 2 ? BIG - round : round / 2;
        assert_int_equal(channel_send(channel, fixture->big, there, 10000, &error), 0);
        nng_msg *message;
        int code;
        while ((code = nng_recvmsg(socket, &message, NNG_FLAG_NONBLOCK)) == NNG_EAGAIN) {
            void *bytes; /* what the socket did not take goes out in a receive */
            size_t size;
            assert_int_equal(channel_receive(channel, 1, &bytes, &size, &error), -ETIMEDOUT);
        }
        assert_int_equal(code, 0);
        check_message(message, fixture->big, there);
        assert_int_equal(nng_send(socket, fixture->big, back, 0), 0);
        channel_expect(channel, fixture->big, back);
    }
}

static void test_request_to_nng(void **state)
{
    struct fixture *fixture = *state;
    struct channel *client;
    struct error error;
    nng_socket server;
    assert_int_equal(nng_rep0_open(&server), 0);
    prepare(server);
    assert_int_equal(nng_listen(server, fixture->url, NULL, 0), 0);
    assert_int_equal(channel_dial(CHANNEL_REQ, fixture->path, -1, &client, &error), 0);
    talk_to_nng(fixture, client, server);
    nng_close(server);
    void *bytes;
    size_t size;
    assert_int_equal(channel_receive(client, 10000, &bytes, &size, &error), -ECONNRESET);
    channel_close(client);
}

static void test_pair_to_nng(void **state)
{
    struct fixture *fixture = *state;
    struct channel *front;
    struct error error;
    nng_socket worker;
    assert_int_equal(nng_pair0_open(&worker), 0);
    prepare(worker);
    assert_int_equal(nng_listen(worker, fixture->url, NULL, 0), 0);
    assert_int_equal(channel_dial(CHANNEL_PAIR, fixture->path, -1, &front, &error), 0);
    talk_to_nng(fixture, front, worker);
    channel_close(front);
    nng_close(worker);
}

struct echo {
    struct channel *channel;
    size_t messages;
};

/* Gives back what came; the asserts are the other thread's. */
static void *run_echo(void *context)
{
    struct echo *echo = context;
    void *bytes;
    size_t size;
    while (echo->messages > 0 && channel_receive(echo->channel, 10000, &bytes, &size, NULL) == 0) {
        echo->messages--;
        channel_send(echo->channel, bytes, size, 10000, NULL);
        free(bytes);
    }
    while (channel_receive(echo->channel, 500, &bytes, &size, NULL) == 0) /* writes the rest of the last one */
        free(bytes);
    return NULL;
}

static void nng_dials(struct fixture *fixture, enum channel_kind kind, nng_socket client)
{
    struct echo echo = {.messages = ROUNDS};
    struct error error;
    pthread_t thread;
    prepare(client);
    assert_int_equal(channel_listen(kind, fixture->path, &echo.channel, &error), 0);
    assert_int_equal(pthread_create(&thread, NULL, run_echo, &echo), 0);
    assert_int_equal(nng_dial(client, fixture->url, NULL, 0), 0);
    for (size_t round = 0; round < ROUNDS; round++) {
        size_t size = round % 2 ? BIG - round : round / 2;
        assert_int_equal(nng_send(client, fixture->big, size, 0), 0);
        nng_msg *message;
        assert_int_equal(nng_recvmsg(client, &message, 0), 0);
        check_message(message, fixture->big, size);
    }
    nng_close(client);
    pthread_join(thread, NULL);
    channel_close(echo.channel);
}

static void test_request_from_nng(void **state)
{
    nng_socket client;
    assert_int_equal(nng_req0_open(&client), 0);
    nng_dials(*state, CHANNEL_REP, client);
}

static void test_pair_from_nng(void **state)
{
    nng_socket client;
    assert_int_equal(nng_pair0_open(&client), 0);
    nng_dials(*state, CHANNEL_PAIR, client);
}

#define NNG_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        NNG_TEST(test_request_to_nng),
        NNG_TEST(test_pair_to_nng),
        NNG_TEST(test_request_from_nng),
        NNG_TEST(test_pair_from_nng),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    nng_fini(); /* it frees closed sockets in a thread of its own, which the end of the process may overtake */
    return failed;
}
