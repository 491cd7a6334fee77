/* Channels: messages of any size both ways, reconnecting, timeouts, paths that are too long; and what a child inherits.
 */
#include "proto/channel.h"
#include "proto/cleanup.h"
#include "proto/heritage.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

struct fixture {
    char folder[64], path[128];
};

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-channel-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    snprintf(fixture->path, sizeof fixture->path, "%s/socket", fixture->folder);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    unlink(fixture->path);
    assert_int_equal(rmdir(fixture->folder), 0);
    free(fixture);
    return 0;
}

static bool readable(int fd, int timeout_ms)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    return poll(&poll_fd, 1, timeout_ms) == 1;
}

static void expect_message(struct channel *channel, const void *bytes, size_t size)
{
    void *got;
    size_t got_size;
    struct error error = {""};
    int status = channel_receive(channel, 5000, &got, &got_size, &error);
    assert_string_equal(error.text, "");
    assert_int_equal(status, 0);
    assert_int_equal(got_size, size);
    assert_true((uintptr_t)got % 8 == 0);
    assert_memory_equal(got, bytes, size);
    free(got);
}

static void test_pair(void **state)
{
    struct fixture *fixture = *state;
    struct channel *worker, *front;
    struct error error = {""};
    void *bytes;
    size_t size;
    /* dialled first: a send connects when the other side listens */
    assert_int_equal(channel_dial(CHANNEL_PAIR, fixture->path, -1, &front, &error), 0);
    assert_int_equal(channel_send(front, "early", 5, 0, &error), -EAGAIN);
    assert_int_equal(channel_receive(front, 0, &bytes, &size, &error), -ECONNRESET);
    assert_false(readable(channel_fd(front), 0));
    assert_int_equal(channel_listen(CHANNEL_PAIR, fixture->path, &worker, &error), 0);
    struct stat status;
    assert_int_equal(stat(fixture->path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(channel_send(front, "early", 5, 0, &error),
                     -EAGAIN); /* nobody has greeted it: a listener has no threads */
    assert_false(readable(channel_fd(front), 0));
    assert_true(readable(channel_fd(worker), 5000));
    assert_int_equal(channel_receive(worker, 0, &bytes, &size, &error), -EAGAIN);
    assert_true(readable(channel_fd(front), 5000));
    assert_int_equal(channel_receive(worker, 10, &bytes, &size, &error), -ETIMEDOUT);
    assert_int_equal(channel_send(front, "step", 4, 5000, &error), 0);
    assert_true(readable(channel_fd(worker), 5000));
    expect_message(worker, "step", 4);
    assert_int_equal(channel_send(worker, "", 0, 5000, &error), 0);
    expect_message(front, "", 0);

    /* the worker ends and another takes its place */
    channel_close(worker);
    assert_int_equal(channel_listen(CHANNEL_PAIR, fixture->path, &worker, &error), 0);
    assert_int_equal(channel_send(worker, "lost", 4, 5000, &error), 0);    /* it has heard of nobody */
    assert_int_equal(channel_send(front, "again", 5, 0, &error), -EAGAIN); /* but it connects */
    assert_true(readable(channel_fd(worker), 5000));
    assert_int_equal(channel_receive(worker, 0, &bytes, &size, &error), -EAGAIN);
    assert_int_equal(channel_send(front, "again", 5, 5000, &error), 0);
    expect_message(worker, "again", 5);
    assert_int_equal(channel_send(worker, "back", 4, 5000, &error), 0);
    expect_message(front, "back", 4);

    /* a front that dies is followed by another while its connection still stands */
    struct channel *next;
    assert_int_equal(channel_dial(CHANNEL_PAIR, fixture->path, -1, &next, &error), 0);
    assert_true(readable(channel_fd(worker), 5000));
    assert_int_equal(channel_receive(worker, 0, &bytes, &size, &error), -EAGAIN);
    assert_int_equal(channel_send(next, "hello", 5, 5000, &error), 0);
    expect_message(worker, "hello", 5);
    assert_int_equal(channel_send(worker, "you", 3, 5000, &error), 0);
    expect_message(next, "you", 3);
    channel_close(next);
    channel_close(worker);
    channel_close(front);
}

#define BIG ((size_t)20 << 20)

/* The server's side of test_request: it answers one request, and ends while the second waits. */
static void *serve_two(void *context)
{
    struct channel *server = context;
    struct error error = {""};
    _cleanup_free_ char *bytes = malloc(BIG);
    assert_non_null(bytes);
    memset(bytes, 'x', BIG);
    expect_message(server, bytes, BIG);
    assert_int_equal(channel_send(server, "done", 4, 5000, &error), 0);
    expect_message(server, "question", 8);
    channel_close(server);
    return NULL;
}

static void test_request(void **state)
{
    struct fixture *fixture = *state;
    struct channel *server, *client;
    struct error error = {""};
    int status = channel_dial(CHANNEL_REQ, fixture->path, -1, &client, &error);
    assert_true(status == -ENOENT || status == -ECONNREFUSED);
    assert_non_null(strstr(error.text, fixture->path));
    assert_int_equal(channel_listen(CHANNEL_REP, fixture->path, &server, &error), 0);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, serve_two, server), 0);
    assert_int_equal(channel_dial(CHANNEL_REQ, fixture->path, -1, &client, &error), 0);
    _cleanup_free_ char *bytes = malloc(BIG);
    assert_non_null(bytes);
    memset(bytes, 'x', BIG);
    assert_int_equal(channel_send(client, bytes, BIG, 5000, &error), 0);
    expect_message(client, "done", 4);

    /* the server ends while a client waits */
    void *got;
    size_t size;
    assert_int_equal(channel_send(client, "question", 8, 5000, &error), 0);
    assert_int_equal(channel_receive(client, 5000, &got, &size, &error), -ECONNRESET);
    assert_int_equal(pthread_join(thread, NULL), 0);
    channel_close(client);
}

static void test_second_listener(void **state)
{
    struct fixture *fixture = *state;
    struct channel *one, *two;
    struct error error = {""};
    assert_int_equal(channel_listen(CHANNEL_REP, fixture->path, &one, &error), 0);
    assert_int_equal(channel_listen(CHANNEL_REP, fixture->path, &two, &error), -EADDRINUSE);
    channel_close(one);
}

/* Ends twice: before it has read the client's greeting, and after. */
static void *accept_and_close(void *context)
{
    const int *listener = context;
    char greeting[8];
    close(accept4(*listener, NULL, NULL, SOCK_CLOEXEC));
    int fd = accept4(*listener, NULL, NULL, SOCK_CLOEXEC);
    ssize_t got = recv(fd, greeting, sizeof greeting, MSG_WAITALL);
    close(fd);
    return got == (ssize_t)sizeof greeting ? context : NULL;
}

/* A server that ends while a client connects is one that does not listen: the client may try again. */
static void test_server_ends(void **state)
{
    struct fixture *fixture = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct channel *channel;
    struct error error;
    pthread_t thread;
    snprintf(address.sun_path, sizeof address.sun_path, "%.100s", fixture->path);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (const struct sockaddr *)(const void *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(pthread_create(&thread, NULL, accept_and_close, &listener), 0);
    void *read_greeting;
    assert_int_equal(channel_dial(CHANNEL_REQ, fixture->path, -1, &channel, &error), -ECONNREFUSED);
    assert_int_equal(channel_dial(CHANNEL_REQ, fixture->path, -1, &channel, &error), -ECONNREFUSED);
    pthread_join(thread, &read_greeting);
    assert_ptr_equal(read_greeting, &listener);
    close(listener);
    unlink(fixture->path);
}

static void test_long_path(void **state)
{
    (void)state;
    char path[200];
    memset(path, 'a', sizeof path);
    path[0] = '/';
    path[108] = 0; /* one byte more than sun_path takes with its zero */
    struct channel *channel;
    struct error error = {""};
    assert_int_equal(channel_listen(CHANNEL_PAIR, path, &channel, &error), -ENAMETOOLONG);
    assert_non_null(strstr(error.text, "107"));
    assert_non_null(strstr(error.text, "CALYPTE_RUNTIME_DIR"));
    assert_int_equal(channel_dial(CHANNEL_REQ, path, -1, &channel, &error), -ENAMETOOLONG);
}

#define ARGV(...) ((char *[]){(char[]){"program"}, __VA_ARGS__})
#define ARG(text) ((char[]){text})

static void test_heritage(void **state)
{
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    char number[16];
    snprintf(number, sizeof number, "%d", ends[1]);
    struct heritage heritage;
    struct error error = {""};
    char **argv = ARGV(ARG("--instance"), ARG("one"), ARG("--rundir"), ARG("/run/x"), ARG("--notify-fd"), number,
                       ARG("--index"), ARG("3"));
    assert_int_equal(heritage_parse(9, argv, &heritage, &error), 0);
    assert_string_equal(heritage.instance, "one");
    assert_string_equal(heritage.rundir, "/run/x");
    assert_true(heritage.notify_fd == ends[1] && heritage.doorbell_fd == -1 && heritage.wake_fd == -1 &&
                heritage.index == 3);
    assert_true(fcntl(ends[1], F_GETFD) & FD_CLOEXEC);
    heritage_notify(&heritage, "two\nlines");
    char line[64] = "";
    assert_int_equal(read(ends[0], line, sizeof line - 1), (int)strlen("failed: two lines\n"));
    assert_string_equal(line, "failed: two lines\n");
    assert_int_equal(read(ends[0], line, sizeof line), 0); /* it closed its end */
    close(ends[0]);

    assert_int_equal(heritage_parse(5, ARGV(ARG("--instance"), ARG("a"), ARG("--index"), ARG("-1")), &heritage, &error),
                     -EINVAL);
    assert_non_null(strstr(error.text, "--index"));
    assert_int_equal(
        heritage_parse(5, ARGV(ARG("--instance"), ARG("a"), ARG("--wake-fd"), ARG("999")), &heritage, &error), -EINVAL);
    assert_non_null(strstr(error.text, "--wake-fd"));
    assert_int_equal(heritage_parse(3, ARGV(ARG("--instance"), ARG("a")), &heritage, &error), -EINVAL);
    assert_non_null(strstr(error.text, "--rundir"));
    assert_int_equal(heritage_parse(2, ARGV(ARG("--rundir")), &heritage, &error), -EINVAL);
    assert_int_equal(heritage_parse(3, ARGV(ARG("--what"), ARG("a")), &heritage, &error), -EINVAL);
    assert_non_null(strstr(error.text, "--what"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_pair, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_request, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_second_listener, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_server_ends, set_up, tear_down),
        cmocka_unit_test(test_long_path),
        cmocka_unit_test(test_heritage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
