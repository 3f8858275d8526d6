/* A search like BLAST's: the sequences of a database that align best with a query, by Smith and Waterman's algorithm. With --children N the
 * guest forks itself: each child searches every Nth sequence of the database, which it has in memory, as its parent had; the parent merges
 * what they found. The output is the same with any number of children.
 *
 *     cc -std=c11 -O2 -static -I /usr/share/vmove/guest/c dna-search.c /usr/share/vmove/guest/c/vmove_fork.c -o dna-search
 *     ./dna-search --children 8
 */
#define _POSIX_C_SOURCE 200809L

#include "vmove_fork.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define QUERY 200
#define TOP 10
/* Points for a pair of equal bases, of different ones, and for a gap. */
#define EQUAL 2
#define DIFFERENT (-1)
#define GAP (-2)
/* Sequences from one relative of the query to the next. */
#define RELATIVES 97

struct hit {
    long score, sequence, end;
};

struct hits {
    size_t count;
    struct hit hit[TOP];
};

static long sequences = 1000, length = 400;
static char *database, query[QUERY];

static void fatal(const char *what, const char *why) {
    fprintf(stderr, "dna-search: %s: %s\n", what, why);
    exit(1);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static uint64_t draw(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

/* The same query and database each time; some sequences have a part of the query in them, with mutations. */
static void fill(void) {
    uint64_t state = 0x9e3779b97f4a7c15;
    database = malloc((size_t)(sequences * length));
    if (database == NULL)
        fatal("database", "no memory");
    for (int i = 0; i < QUERY; i++)
        query[i] = "ACGT"[draw(&state) % 4];
    for (long i = 0; i < sequences * length; i++)
        database[i] = "ACGT"[draw(&state) % 4];
    for (long s = RELATIVES; s < sequences; s += RELATIVES) {
        long part = 40 + (long)(draw(&state) % (QUERY - 40)), at = (long)(draw(&state) % (uint64_t)(length - part));
        for (long i = 0; i < part; i++)
            if (draw(&state) % 10 > 0)
                database[s * length + at + i] = query[i];
    }
}

static long larger(long a, long b) {
    return a > b ? a : b;
}

/* The best alignment of the query with a part of a sequence. */
static struct hit align(long sequence) {
    long row[QUERY + 1] = {0};
    struct hit best = {.score = 0, .sequence = sequence, .end = 0};
    for (long at = 0; at < length; at++) {
        long diagonal = 0;
        for (int i = 1; i <= QUERY; i++) {
            long pair = diagonal + (database[sequence * length + at] == query[i - 1] ? EQUAL : DIFFERENT);
            diagonal = row[i];
            row[i] = larger(larger(0, pair), larger(row[i], row[i - 1]) + GAP);
            if (row[i] > best.score) {
                best.score = row[i];
                best.end = at;
            }
        }
    }
    return best;
}

/* Keeps the best; of equal ones those that come first in the database. */
static void keep(struct hits *hits, struct hit hit) {
    size_t at = hits->count;
    while (at > 0 && (hits->hit[at - 1].score < hit.score ||
                      (hits->hit[at - 1].score == hit.score && hits->hit[at - 1].sequence > hit.sequence)))
        at--;
    if (at == TOP)
        return;
    if (hits->count < TOP)
        hits->count++;
    memmove(&hits->hit[at + 1], &hits->hit[at], (hits->count - at - 1) * sizeof hit);
    hits->hit[at] = hit;
}

static struct hits search(long first, long step) {
    struct hits hits = {0};
    for (long sequence = first; sequence < sequences; sequence += step)
        keep(&hits, align(sequence));
    return hits;
}

/* In a child: leaves its hits as a list of numbers. */
static void leave(struct vmove_fork_port *port, const struct vmove_fork_role *role) {
    struct hits hits = search(role->index - 1, role->size);
    char result[TOP * 64] = "[", *to = result + 1;
    for (size_t i = 0; i < hits.count; i++)
        to += sprintf(to, "%s%ld,%ld,%ld", i > 0 ? "," : "", hits.hit[i].score, hits.hit[i].sequence, hits.hit[i].end);
    strcpy(to, "]");
    vmove_exit(port, role->ticket, result);
    fatal("child", vmove_fork_error(port));
}

/* Reads what a child has left. */
static void merge(struct hits *hits, const struct vmove_fork_end *end) {
    if (end->lost != NULL)
        fatal("a child is lost", end->lost);
    struct hit hit;
    for (const char *at = end->result; *at == '[' || *at == ',';) {
        int past;
        if (sscanf(at + 1, "%ld,%ld,%ld%n", &hit.score, &hit.sequence, &hit.end, &past) != 3)
            break;
        keep(hits, hit);
        at += past + 1;
    }
}

static struct hits shared(unsigned children) {
    struct hits hits = {0};
    struct vmove_fork_port *port;
    struct vmove_fork_role role;
    struct vmove_fork_ends ends;
    if (vmove_fork_open(&port, NULL) != VMOVE_FORK_OK)
        fatal("port", vmove_fork_error(port));
    double begun = seconds();
    if (vmove_fork(port, children, &role) != VMOVE_FORK_OK)
        fatal("fork", vmove_fork_error(port));
    if (role.index > 0)
        leave(port, &role);
    fprintf(stderr, "dna-search: %u children run after %.3f s\n", role.size, seconds() - begun);
    if (vmove_join(port, role.ticket, &ends) != VMOVE_FORK_OK)
        fatal("join", vmove_fork_error(port));
    for (size_t i = 0; i < ends.count; i++)
        merge(&hits, &ends.end[i]);
    vmove_fork_free_ends(&ends);
    vmove_fork_close(port);
    return hits;
}

int main(int count, char **words) {
    long children = 0;
    for (int i = 1; i + 1 < count; i += 2) {
        long value = strtol(words[i + 1], NULL, 10);
        if (strcmp(words[i], "--children") == 0)
            children = value;
        else if (strcmp(words[i], "--sequences") == 0)
            sequences = value;
        else if (strcmp(words[i], "--length") == 0)
            length = value;
        else
            count = 0;
    }
    if (count % 2 == 0 || children < 0 || sequences < 1 || length < 2 * QUERY || sequences > INT32_MAX / length) {
        fprintf(stderr, "Usage: dna-search [--children N] [--sequences N] [--length N, %d or more]\n", 2 * QUERY);
        return 2;
    }
    fill();
    double begun = seconds();
    struct hits hits = children > 0 ? shared((unsigned)children) : search(0, 1);
    fprintf(stderr, "dna-search: %ld sequences of %ld bases, %ld children: %.3f s\n", sequences, length, children, seconds() - begun);
    for (size_t i = 0; i < hits.count; i++)
        printf("%2zu. sequence %ld: score %ld, to base %ld\n", i + 1, hits.hit[i].sequence, hits.hit[i].score, hits.hit[i].end);
    return 0;
}
