/* Tests vmove_fork.c against the other end of a socket, which says what a host says, and in what pieces. Prints "ok" at the end. */
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE

#include "vmove_fork.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define CHECK(what)                                                                                       \
    do {                                                                                                  \
        if (!(what)) {                                                                                    \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #what, vmove_fork_error(port)); \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

#define BUSY "{\"error\":\"busy\",\"message\":\"too many lines\"}\n"
#define CHILD "{\"role\":\"child\",\"index\":3,\"size\":4,\"ticket\":\"t\"}\n"

/* The host: reads a line, then says the next answer in pieces; `heard` has what it read. */
struct host {
    int descriptor;
    const char *answers[4];
    size_t piece;
    char heard[4][256];
    size_t lengths[4];
    pthread_t thread;
};

static void *host_main(void *argument) {
    struct host *host = argument;
    for (int i = 0; i < 4 && host->answers[i] != NULL; i++) {
        char byte;
        while (read(host->descriptor, &byte, 1) == 1 && byte != '\n') {
            if (host->lengths[i] < sizeof host->heard[i] - 1)
                host->heard[i][host->lengths[i]] = byte;
            host->lengths[i]++;
        }
        size_t left = strlen(host->answers[i]);
        for (const char *at = host->answers[i]; left > 0;) {
            ssize_t count = write(host->descriptor, at, left < host->piece ? left : host->piece);
            if (count <= 0)
                return NULL;
            at += count;
            left -= (size_t)count;
            usleep(1000);
        }
    }
    return NULL;
}

static struct vmove_fork_port *start(struct host *host) {
    struct vmove_fork_port *port = NULL;
    int pair[2];
    sigset_t all, before;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    host->descriptor = pair[1];
    CHECK(vmove_fork_open_descriptor(&port, pair[0]) == VMOVE_FORK_OK);
    /* Signals are the other thread's, which waits in poll. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    CHECK(pthread_create(&host->thread, NULL, host_main, host) == 0);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return port;
}

static void end(struct host *host, struct vmove_fork_port *port) {
    pthread_join(host->thread, NULL);
    close(host->descriptor);
    vmove_fork_close(port);
}

static void a_busy_host_is_asked_again(void) {
    struct host host = {.answers = {BUSY, CHILD}, .piece = 7};
    struct vmove_fork_port *port = start(&host);
    struct vmove_fork_role role;
    CHECK(vmove_fork(port, 4, &role) == VMOVE_FORK_OK);
    CHECK(role.index == 3 && role.size == 4 && strcmp(role.ticket, "t") == 0);
    CHECK(strcmp(host.heard[0], "{\"fork\":4}") == 0 && strcmp(host.heard[1], host.heard[0]) == 0);
    end(&host, port);
}

static void long_answers_are_read_and_others_passed_over(void) {
    size_t length = 60000;
    char *text = malloc(length + 1), *answer = malloc(20 * (length + 64)), *to = answer;
    memset(text, 'r', length);
    text[length] = '\0';
    to += sprintf(to, "%s{\"joined\":\"other\",\"children\":[]}\n{\"children\": [", CHILD);
    for (int i = 1; i <= 18; i++)
        to += sprintf(to, "{\"index\":%d,\"result\":{\"s\":\"%s\",\"n\":[1,2.5e3]}},", i, text);
    sprintf(to, "{\"index\":19,\"lost\":\"kill\\u0065d \\ud83d\\ude00\\n\"}] ,\"joined\":\"t\"}\n");
    struct host host = {.answers = {answer}, .piece = 33333};
    struct vmove_fork_port *port = start(&host);
    struct vmove_fork_ends ends;
    CHECK(vmove_join(port, "t", &ends) == VMOVE_FORK_OK);
    CHECK(ends.count == 19 && ends.end[17].index == 18 && ends.end[17].lost == NULL);
    CHECK(strlen(ends.end[17].result) == length + 22 && strstr(ends.end[17].result, "2.5e3]}") != NULL);
    CHECK(ends.end[18].result == NULL && strcmp(ends.end[18].lost, "killed \xf0\x9f\x98\x80\n") == 0);
    vmove_fork_free_ends(&ends);
    end(&host, port);
    free(text);
    free(answer);
}

static void ticks(int signal) {
    (void)signal;
}

static void signals_disturb_nothing(void) {
    struct host host = {.answers = {"{\"killed\":\"t\",\"children\":12}\n"}, .piece = 1};
    struct sigaction action = {.sa_handler = ticks};
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    unsigned living = 0;
    struct vmove_fork_port *port = start(&host);
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    CHECK(vmove_kill(port, "t", &living) == VMOVE_FORK_OK && living == 12);
    setitimer(ITIMER_REAL, &never, NULL);
    end(&host, port);
}

static void a_child_leaves_a_text(void) {
    struct host host = {.answers = {"{\"error\":\"bad-request\",\"message\":\"no such ticket\"}\n"}, .piece = 100};
    struct vmove_fork_port *port = start(&host);
    CHECK(vmove_exit_text(port, "t", "a \"b\"\n\\") == VMOVE_FORK_BAD_REQUEST);
    CHECK(strcmp(vmove_fork_error(port), "bad-request: no such ticket") == 0);
    CHECK(strcmp(host.heard[0], "{\"exit\":\"t\",\"result\":\"a \\\"b\\\"\\u000a\\\\\"}") == 0);
    char *text = vmove_fork_text("\"a \\\"b\\\"\\u000a\\\\\"");
    CHECK(text != NULL && strcmp(text, "a \"b\"\n\\") == 0);
    free(text);
    end(&host, port);
}

static void what_a_line_holds(void) {
    struct host host = {.answers = {"{\"error\":\"forbidden\",\"message\":\"no\"}\n"}, .piece = 100};
    struct vmove_fork_port *port = start(&host);
    /* {"exit":"t","result":"…"} */
    size_t around = 24;
    char *text = malloc(VMOVE_FORK_MAX_LINE + 1);
    memset(text, 'x', VMOVE_FORK_MAX_LINE);
    text[VMOVE_FORK_MAX_LINE - around + 1] = '\0';
    int longer = vmove_exit_text(port, "t", text);
    text[VMOVE_FORK_MAX_LINE - around] = '\0';
    int longest = vmove_exit_text(port, "t", text);
    free(text);
    CHECK(longest == VMOVE_FORK_FORBIDDEN && host.lengths[0] == VMOVE_FORK_MAX_LINE);
    CHECK(longer == VMOVE_FORK_TOO_LONG);
    for (const char *const *wrong = (const char *const[]){"", "{", "[1,", "\"a", "1 2", "{\"a\":1}\n", "{1:2}", NULL}; *wrong; wrong++)
        CHECK(vmove_exit(port, "t", *wrong) == VMOVE_FORK_BAD_REQUEST);
    end(&host, port);
}

static void what_is_no_answer_is_told(void) {
    static const char *const wrong[] = {"OK\n",
                                        "\n",
                                        "{\"role\":\"child\"}\n",
                                        "{\"role\":\"child\",\"index\":-1,\"size\":1,\"ticket\":\"t\"}\n",
                                        "{\"role\":\"child\",\"index\":1.5,\"size\":1,\"ticket\":\"t\"}\n",
                                        "{\"role\":\"child\",\"index\":9999999999,\"size\":1,\"ticket\":\"t\"}\n"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct host host = {.answers = {wrong[i]}, .piece = 100};
        struct vmove_fork_port *port = start(&host);
        struct vmove_fork_role role;
        CHECK(vmove_fork(port, 1, &role) == VMOVE_FORK_BAD_ANSWER);
        end(&host, port);
    }
}

static void no_port_and_no_device(void) {
    struct vmove_fork_port *port;
    CHECK(vmove_fork_open(&port, "/no/such/device") == VMOVE_FORK_IO && strstr(vmove_fork_error(port), "/no/such/device") != NULL);
    struct vmove_fork_role role;
    CHECK(vmove_fork(port, 1, &role) == VMOVE_FORK_NO_PORT);
    vmove_fork_close(port);
    vmove_fork_close(NULL);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    a_busy_host_is_asked_again();
    long_answers_are_read_and_others_passed_over();
    signals_disturb_nothing();
    a_child_leaves_a_text();
    what_a_line_holds();
    what_is_no_answer_is_told();
    no_port_and_no_device();
    puts("ok");
    return 0;
}
