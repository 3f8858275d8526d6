//! Messages of a fork, of the distribution of its memory, and of guests that fork themselves.

use vmove_clone::engine::read_opening;
use vmove_clone::fuzzing;
use vmove_spread::fuzzing as spread;

use super::{Target, ready, text};

pub const TO_HOST: Target = Target {
    name: "to-host",
    what: "messages of a fork's parent, and the parts of memory that they name",
    feed: fuzzing::to_host,
    seeds: fuzzing::to_host_seeds,
    words: &[],
    mutations: 300_000,
};

pub const TO_PARENT: Target = Target {
    name: "to-parent",
    what: "messages of a fork's hosts, and the reports in them",
    feed: fuzzing::to_parent,
    seeds: fuzzing::to_parent_seeds,
    words: &[],
    mutations: 450_000,
};

pub const OPENING: Target = Target {
    name: "fork-opening",
    what: "the first bytes of a connection for a fork's memory",
    feed: |bytes| {
        if let Ok((_, greeting)) = ready(read_opening(&mut &bytes[..])) {
            assert!(greeting.len() <= 4096);
        }
    },
    seeds: || vec![vec![1, 3, 0, 1, 2, 3], vec![0, 0, 0]],
    words: &[],
    mutations: 900_000,
};

pub const SPREAD_MESSAGES: Target = Target {
    name: "spread-messages",
    what: "messages of a distribution, in frames, and its layout",
    feed: spread::messages,
    seeds: spread::messages_seeds,
    words: &[],
    mutations: 450_000,
};

pub const SPREAD_ENGINES: Target = Target {
    name: "spread-engines",
    what: "a host and the root of a distribution, which hear messages in any order",
    feed: spread::engines,
    seeds: spread::engines_seeds,
    words: &[],
    mutations: 150_000,
};

pub const GUEST_LINES: Target = Target {
    name: "guest-lines",
    what: "lines of a guest that forks itself",
    feed: fuzzing::guest,
    seeds: || {
        text(&[
            "{\"fork\": 4}\n",
            "{\"join\": \"t\"}\n{\"kill\":\"t\"}\n",
            "{\"exit\":\"t\",\"result\":[1,{\"a\":null}]}\n",
        ])
    },
    words: &[
        "{\"fork\":",
        "\"join\":",
        "\"exit\":",
        "\"kill\":",
        "\"result\":",
        "}\n",
        "[[[[[[[[",
        "null",
        "-1",
        "1e99",
    ],
    mutations: 600_000,
};
