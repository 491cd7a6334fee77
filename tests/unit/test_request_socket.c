/* The asking side of REQ/REP, and PAIR's: listeners that keep to the protocol, in any pieces, and all kinds that do not. */
#include "proto/cleanup.h"
#include "proto/clock.h"
#include "proto/request_socket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>

#define MOST 100000u
#define REP_GREETING "\0SP\0\0\x31\0\0"
#define PAIR_GREETING "\0SP\0\0\x10\0\0"
#define HEAD_BYTES 13u /* of a frame with a request's id */

struct fixture {
    char folder[64], path[128];
    int listener;
};

static void listen_again(struct fixture *fixture)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, fixture->path, strlen(fixture->path) + 1);
    unlink(fixture->path);
    fixture->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fixture->listener >= 0);
    assert_int_equal(bind(fixture->listener, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fixture->listener, 8), 0);
}

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-request-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    snprintf(fixture->path, sizeof fixture->path, "%s/socket", fixture->folder);
    listen_again(fixture);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    close(fixture->listener);
    unlink(fixture->path);
    assert_int_equal(rmdir(fixture->folder), 0);
    free(fixture);
    return 0;
}

static size_t descriptors(void)
{
    size_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static bool readable(int fd)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    return poll(&poll_fd, 1, 0) == 1;
}

/* A listener that accepts one and says something, byte by byte. */
struct greeter {
    int listener, fd;
    const char *bytes;
    size_t size;
};

static void *greet(void *context)
{
    struct greeter *greeter = context;
    greeter->fd = accept4(greeter->listener, NULL, NULL, SOCK_CLOEXEC);
    for (size_t i = 0; i < greeter->size; i++)
        if (send(greeter->fd, greeter->bytes + i, 1, MSG_NOSIGNAL) == 1)
            usleep(200);
    if (greeter->size != 8) { /* that was no greeting */
        close(greeter->fd);
        greeter->fd = -1;
    }
    return NULL;
}

/* Dials as REQ; *ret_fd is the listener's end. */
static int dial(struct fixture *fixture, const char *bytes, size_t size, size_t most,
                struct request_socket **ret_socket, int *ret_fd)
{
    struct greeter greeter = {.listener = fixture->listener, .bytes = bytes, .size = size};
    struct error error = {""};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, greet, &greeter), 0);
    int status = request_socket_dial(SP_REQ, fixture->path, most, -1, ret_socket, &error);
    assert_int_equal(pthread_join(thread, NULL), 0);
    if (status < 0)
        assert_non_null(strstr(error.text, fixture->path));
    *ret_fd = greeter.fd;
    return status;
}

static struct request_socket *dial_well(struct fixture *fixture, int *ret_fd)
{
    struct request_socket *socket;
    unsigned char greeting[8];
    assert_int_equal(dial(fixture, REP_GREETING, 8, MOST, &socket, ret_fd), 0);
    assert_int_equal(recv(*ret_fd, greeting, sizeof greeting, MSG_WAITALL), sizeof greeting);
    assert_memory_equal(greeting, "\0SP\0\0\x30\0\0", sizeof greeting);
    return socket;
}

/* Reads a request and says its id. */
static uint32_t expect_request(int fd, const char *body)
{
    unsigned char got[256];
    size_t size = strlen(body);
    assert_int_equal(recv(fd, got, HEAD_BYTES + size, MSG_WAITALL), HEAD_BYTES + size);
    assert_int_equal(got[0], 1);
    assert_memory_equal(got + 1, "\0\0\0\0\0\0", 6);
    assert_int_equal(got[7] << 8 | got[8], size + 4);
    assert_true(got[9] & 0x80);
    assert_memory_equal(got + HEAD_BYTES, body, size);
    return (uint32_t)got[9] << 24 | (uint32_t)got[10] << 16 | (uint32_t)got[11] << 8 | got[12];
}

/* A frame with an answer. */
static size_t frame(unsigned char *to, uint32_t id, const char *body)
{
    size_t length = strlen(body) + 4;
    memset(to, 0, 9);
    to[0] = 1;
    to[7] = (unsigned char)(length >> 8);
    to[8] = (unsigned char)length;
    to[9] = (unsigned char)(id >> 24);
    to[10] = (unsigned char)(id >> 16);
    to[11] = (unsigned char)(id >> 8);
    to[12] = (unsigned char)id;
    memcpy(to + HEAD_BYTES, body, strlen(body));
    return HEAD_BYTES + strlen(body);
}

static void ask(struct request_socket *socket, const char *body)
{
    struct error error;
    assert_int_equal(request_socket_send(socket, body, strlen(body), 0, &error), 0);
}

static int receive_status(struct request_socket *socket, int timeout_ms)
{
    void *bytes;
    size_t size;
    struct error error;
    int status = request_socket_receive(socket, timeout_ms, &bytes, &size, &error);
    assert_true(status < 0);
    return status;
}

static void expect_answer(struct request_socket *socket, const char *body)
{
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    struct error error;
    assert_int_equal(request_socket_receive(socket, 5000, &bytes, &size, &error), 0);
    assert_int_equal(size, strlen(body));
    assert_true((uintptr_t)bytes % 8 == 0);
    assert_memory_equal(bytes, body, size);
}

/* An answer byte by byte, answers to others, and two at once. */
static void test_pieces(void **state)
{
    struct fixture *fixture = *state;
    unsigned char bytes[256];
    int fd;
    struct request_socket *socket = dial_well(fixture, &fd);
    ask(socket, "one");
    uint32_t first = expect_request(fd, "one");
    size_t length = frame(bytes, first, "answer");
    for (size_t i = 0; i < length; i++) {
        assert_int_equal(receive_status(socket, 0), -EAGAIN);
        assert_false(readable(request_socket_fd(socket)));
        assert_int_equal(send(fd, bytes + i, 1, 0), 1);
    }
    assert_true(readable(request_socket_fd(socket)));
    expect_answer(socket, "answer");
    assert_false(readable(request_socket_fd(socket)));

    ask(socket, "two");
    ask(socket, "");
    assert_int_equal(expect_request(fd, "two"), first + 1);
    assert_int_equal(expect_request(fd, ""), first + 2);
    length = frame(bytes, first, "again");
    length += frame(bytes + length, first + 1, "late");
    memcpy(bytes + length, "\1\0\0\0\0\0\0\0\3abc", 12); /* no id */
    length += 12;
    length += frame(bytes + length, first + 2, "");
    assert_int_equal(send(fd, bytes, length, 0), length);
    expect_answer(socket, "");
    assert_int_equal(receive_status(socket, 20), -ETIMEDOUT);
    request_socket_close(socket);
    assert_int_equal(recv(fd, bytes, 1, 0), 0);
    close(fd);
}

/* A listener that does not greet as REP is none, and one that does not answer in frames has ended. */
static void test_bad_servers(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *bytes;
        size_t size;
        int status;
    } greetings[] = {
        {"", 0, -ECONNREFUSED},      {REP_GREETING, 7, -ECONNREFUSED},  {"\0SP\0\0\x30\0\0", 8, -EPROTO},
        {PAIR_GREETING, 8, -EPROTO}, {"HTTP/1.1 400 Bad", 16, -EPROTO},
    };
    static const struct {
        const char *bytes;
        size_t size;
        bool ends; /* as soon as that has come */
    } answers[] = {
        {"", 0, false},
        {"\1\0\0", 3, false},
        {"\1\0\0\0\0\0\1\0\0\x80\0\0\1abc", 16, false},
        {"\1\0\0\0\0\0\0\0\0", 9, false},
        {"\2\0\0\0\0\0\0\0\5", 9, true},
        {"\1\xff\xff\xff\xff\xff\xff\xff\xff", 9, true},
        {"\1\0\0\0\0\0\1\x86\xa5", 9, true}, /* MOST, the id and one more */
    };
    size_t before = descriptors();
    struct request_socket *socket;
    int fd;
    for (size_t i = 0; i < sizeof greetings / sizeof greetings[0]; i++) {
        int status = dial(fixture, greetings[i].bytes, greetings[i].size, MOST, &socket, &fd);
        assert_int_equal(status, greetings[i].status);
        if (fd >= 0)
            close(fd);
        assert_int_equal(descriptors(), before);
    }
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        socket = dial_well(fixture, &fd);
        ask(socket, "question");
        if (answers[i].size > 0)
            assert_int_equal(send(fd, answers[i].bytes, answers[i].size, 0), answers[i].size);
        assert_int_equal(receive_status(socket, 0), answers[i].ends ? -ECONNRESET : -EAGAIN);
        close(fd);
        assert_int_equal(receive_status(socket, 5000), -ECONNRESET);
        assert_false(readable(request_socket_fd(socket)));
        request_socket_close(socket);
        assert_int_equal(descriptors(), before);
    }
}

/* What was said before the end is heard, also by one who listens late or has been sending still. */
static void test_last_answer(void **state)
{
    struct fixture *fixture = *state;
    unsigned char bytes[64];
    static char large[2000000];
    struct error error;
    int fd;
    struct request_socket *socket = dial_well(fixture, &fd);
    for (int cut_off = 0; cut_off < 2; cut_off++) {
        ask(socket, "question");
        size_t length = frame(bytes, expect_request(fd, "question"), "answer");
        assert_int_equal(send(fd, bytes, length, 0), length);
        if (cut_off) {   /* the listener has not read all, and its end is a reset */
            bytes[12]++; /* the answer to the next request */
            assert_int_equal(send(fd, bytes, length, 0), length);
            assert_int_equal(request_socket_send(socket, large, sizeof large, 0, &error), 0);
        }
        close(fd);
        expect_answer(socket, "answer");
        assert_int_equal(receive_status(socket, 0), -ECONNRESET);
        if (!cut_off) { /* the next request makes a connection */
            struct greeter greeter = {.listener = fixture->listener, .bytes = REP_GREETING, .size = 8};
            pthread_t thread;
            assert_int_equal(pthread_create(&thread, NULL, greet, &greeter), 0);
            assert_int_equal(request_socket_send(socket, "hello", 5, 5000, &error), 0);
            assert_int_equal(pthread_join(thread, NULL), 0);
            fd = greeter.fd;
            assert_int_equal(recv(fd, bytes, 8, MSG_WAITALL), 8);
            expect_request(fd, "hello");
        }
    }
    request_socket_close(socket);
}

/* A listener that reads nothing: the first message is kept, the next one waits, and all that was taken arrives whole. */
static void test_reads_nothing(void **state)
{
    struct fixture *fixture = *state;
    static char sent[3000000], got[3000000];
    struct error error;
    int fd;
    struct request_socket *socket = dial_well(fixture, &fd);
    for (size_t i = 0; i < sizeof sent; i++)
        sent[i] = (char)(i % 251);
    assert_int_equal(request_socket_send(socket, sent, sizeof sent, 0, &error), 0);
    assert_int_equal(request_socket_send(socket, "next", 4, 0, &error), -EAGAIN);
    int64_t start = clock_ms();
    assert_int_equal(request_socket_send(socket, "next", 4, 100, &error), -ETIMEDOUT);
    assert_in_range(clock_ms() - start, 100, 3000);
    assert_int_equal(receive_status(socket, 0), -EAGAIN);
    assert_false(readable(request_socket_fd(socket)));
    size_t read = 0;
    while (read < HEAD_BYTES + sizeof sent) {
        ssize_t some = recv(fd, read < HEAD_BYTES ? got : got + read - HEAD_BYTES,
                            read < HEAD_BYTES ? HEAD_BYTES - read : HEAD_BYTES + sizeof got - read, MSG_DONTWAIT);
        if (some > 0)
            read += (size_t)some;
        else {
            assert_true(readable(request_socket_fd(socket))); /* there is room */
            assert_int_equal(receive_status(socket, 0), -EAGAIN);
        }
    }
    assert_memory_equal(got, sent, sizeof sent);
    assert_int_equal(request_socket_send(socket, "next", 4, 0, &error), 0);
    unsigned char answer[64];
    size_t length = frame(answer, expect_request(fd, "next"), "yes");
    assert_int_equal(send(fd, answer, length, 0), length);
    expect_answer(socket, "yes");

    assert_int_equal(request_socket_send(socket, sent, sizeof sent, 0, &error), 0);
    start = clock_ms();
    request_socket_close(socket);
    assert_in_range(clock_ms() - start, 0, 500); /* for nobody */
    close(fd);
}

/* A listener that is stopped: the dial ends when it is told to, or after a while. */
static void test_stopped_server(void **state)
{
    struct fixture *fixture = *state;
    struct request_socket *socket;
    struct error error;
    int ends[2];
    size_t before = descriptors();
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "x", 1), 1);
    assert_int_equal(request_socket_dial(SP_REQ, fixture->path, MOST, ends[0], &socket, &error), -EINTR);
    close(ends[0]);
    close(ends[1]);
    int64_t start = clock_ms();
    assert_int_equal(request_socket_dial(SP_REQ, fixture->path, MOST, -1, &socket, &error), -ETIMEDOUT);
    assert_in_range(clock_ms() - start, 9900, 15000);
    assert_non_null(strstr(error.text, "greeted"));
    assert_int_equal(descriptors(), before);
}

/* So many wait for a stopped listener that no more may: that is waiting too. */
static void test_full_backlog(void **state)
{
    struct fixture *fixture = *state;
    struct request_socket *waiting[64], *socket;
    struct error error;
    int ends[2];
    for (size_t i = 0; i < 64; i++)
        assert_int_equal(request_socket_dial(SP_PAIR, fixture->path, MOST, -1, &waiting[i], &error), 0);
    assert_int_equal(request_socket_send(waiting[63], "x", 1, 0, &error), -EAGAIN);
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "x", 1), 1);
    assert_int_equal(request_socket_dial(SP_REQ, fixture->path, MOST, ends[0], &socket, &error), -EINTR);
    close(ends[0]);
    close(ends[1]);
    for (size_t i = 0; i < 64; i++)
        request_socket_close(waiting[i]);
}

static void expect_pair(int fd, const char *body)
{
    unsigned char got[64];
    size_t size = strlen(body);
    assert_int_equal(recv(fd, got, 9 + size, MSG_WAITALL), 9 + size);
    assert_int_equal(got[8], size);
    assert_memory_equal(got + 9, body, size);
}

/* PAIR: nobody there yet, there but silent, gone before the greeting, gone after it, there again. */
static void test_pair(void **state)
{
    struct fixture *fixture = *state;
    struct request_socket *socket;
    struct error error;
    char greeting[8];
    close(fixture->listener);
    assert_int_equal(request_socket_dial(SP_PAIR, fixture->path, MOST, -1, &socket, &error), 0);
    assert_int_equal(request_socket_send(socket, "x", 1, 0, &error), -EAGAIN);
    int64_t start = clock_ms();
    assert_int_equal(request_socket_send(socket, "x", 1, 100, &error), -ETIMEDOUT);
    assert_in_range(clock_ms() - start, 100, 3000);
    assert_int_equal(receive_status(socket, 5000), -ECONNRESET);
    listen_again(fixture);
    for (int round = 0; round < 5; round++) {
        assert_int_equal(request_socket_send(socket, "early", 5, 0, &error), -EAGAIN);
        int fd = accept4(fixture->listener, NULL, NULL, SOCK_CLOEXEC);
        assert_int_equal(recv(fd, greeting, sizeof greeting, MSG_WAITALL), sizeof greeting);
        assert_memory_equal(greeting, PAIR_GREETING, sizeof greeting);
        assert_int_equal(request_socket_send(socket, "early", 5, 20, &error), -ETIMEDOUT);
        if (round % 2 == 0) {
            assert_false(readable(request_socket_fd(socket)));
            assert_int_equal(send(fd, PAIR_GREETING, 8, 0), 8);
            assert_true(readable(request_socket_fd(socket)));
            assert_int_equal(receive_status(socket, 0), -EAGAIN);
            assert_int_equal(request_socket_send(socket, "step", 4, 0, &error), 0);
            expect_pair(fd, "step");
            assert_int_equal(send(fd, "\1\0\0\0\0\0\0\0\4done\1\0\0\0\0\0\0\0\0", 22, 0), 22);
            expect_answer(socket, "done");
            expect_answer(socket, "");
        }
        close(fd);
        if (round < 3) { /* otherwise the next send finds out */
            assert_true(readable(request_socket_fd(socket)));
            assert_int_equal(receive_status(socket, 0), -ECONNRESET);
            assert_false(readable(request_socket_fd(socket)));
        }
    }
    request_socket_close(socket);
}

/* Memory is had for bytes that have come, not for those that were announced. */
static void test_announced(void **state)
{
    struct fixture *fixture = *state;
    static char some[100000];
    struct request_socket *socket;
    int fd;
    assert_int_equal(dial(fixture, REP_GREETING, 8, SIZE_MAX / 2, &socket, &fd), 0);
    ask(socket, "question");
    assert_int_equal(send(fd, "\1\0\1\0\0\0\0\0\0", 9, 0), 9); /* 2^48 bytes */
    assert_int_equal(send(fd, some, sizeof some, 0), sizeof some);
    assert_int_equal(receive_status(socket, 0), -EAGAIN);
    request_socket_close(socket);
    close(fd);
}

static void test_no_descriptors(void **state)
{
    struct fixture *fixture = *state;
    struct request_socket *socket;
    struct error error;
    struct rlimit limit, none;
    int lowest = dup(0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int left = 0; left < 2; left++) {
        none = limit;
        none.rlim_cur = (rlim_t)lowest + (rlim_t)left;
        close(lowest);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
        int status = left ? request_socket_dial(SP_REQ, fixture->path, MOST, -1, &socket, &error)
                          : request_socket_dial(SP_PAIR, fixture->path, MOST, -1, &socket, &error);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
        assert_int_equal(status, -EMFILE);
        assert_non_null(strstr(error.text, fixture->path));
        assert_int_equal(dup(0), lowest);
    }
    close(lowest);
}

static void on_alarm(int number)
{
    (void)number;
}

static void *echo_large(void *context)
{
    const int *fd = context;
    static char bytes[HEAD_BYTES + 5000000];
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    if (recv(*fd, bytes, sizeof bytes, MSG_WAITALL) != (ssize_t)sizeof bytes)
        return NULL;
    return send(*fd, bytes, sizeof bytes, MSG_NOSIGNAL) == (ssize_t)sizeof bytes ? context : NULL;
}

/* Signals in every wait, whose handlers do not restart it. */
static void test_signals(void **state)
{
    struct fixture *fixture = *state;
    struct request_socket *socket;
    static char sent[5000000];
    struct error error;
    pthread_t thread;
    void *whole;
    int fd;
    char greeting[8];
    struct sigaction action = {.sa_handler = on_alarm}, before;
    assert_int_equal(sigaction(SIGALRM, &action, &before), 0);
    assert_int_equal(dial(fixture, REP_GREETING, 8, sizeof sent, &socket, &fd), 0);
    assert_int_equal(recv(fd, greeting, sizeof greeting, MSG_WAITALL), sizeof greeting);
    const struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    memset(sent, 'x', sizeof sent);
    assert_int_equal(pthread_create(&thread, NULL, echo_large, &fd), 0);
    setitimer(ITIMER_REAL, &often, NULL);
    assert_int_equal(request_socket_send(socket, sent, sizeof sent, 10000, &error), 0);
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    int status = request_socket_receive(socket, 20000, &bytes, &size, &error);
    int64_t start = clock_ms();
    int none = receive_status(socket, 100);
    int64_t waited = clock_ms() - start;
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &before, NULL);
    assert_int_equal(status, 0);
    assert_int_equal(size, sizeof sent);
    assert_memory_equal(bytes, sent, sizeof sent);
    assert_int_equal(none, -ETIMEDOUT);
    assert_in_range(waited, 100, 3000);
    pthread_join(thread, &whole);
    assert_ptr_equal(whole, &fd);
    request_socket_close(socket);
    close(fd);
}

/* A child that has just been forked holds every descriptor for a moment: a connection that was given up meanwhile is heard of no more. */
static void test_child_holds(void **state)
{
    struct fixture *fixture = *state;
    int fd;
    struct request_socket *socket = dial_well(fixture, &fd);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(5);
        pause();
        _exit(0);
    }
    assert_int_equal(send(fd, "no frame begins so", 18, MSG_NOSIGNAL), 18);
    assert_int_equal(receive_status(socket, 0), -ECONNRESET);
    assert_int_equal(send(fd, "to whom it may concern", 22, MSG_NOSIGNAL), 22); /* the child's copy gets it */
    assert_false(readable(request_socket_fd(socket)));
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(fd);
    request_socket_close(socket);
}

#define REQUEST_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        REQUEST_TEST(test_pieces),        REQUEST_TEST(test_bad_servers),    REQUEST_TEST(test_last_answer),
        REQUEST_TEST(test_reads_nothing), REQUEST_TEST(test_stopped_server), REQUEST_TEST(test_full_backlog),
        REQUEST_TEST(test_pair),          REQUEST_TEST(test_announced),      REQUEST_TEST(test_no_descriptors),
        REQUEST_TEST(test_signals),       REQUEST_TEST(test_child_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
