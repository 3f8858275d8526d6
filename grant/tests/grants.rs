//! What a node refuses, and that nothing has changed then.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use vmove_grant::{Book, Demand, Grant, GrantError, GrantedDevice, Host, SecretKey};

const NOW: u64 = 1_000_000;

fn grant(vm: &str, serial: u64) -> Grant {
    Grant {
        lease: format!("lease-of-{vm}"),
        holder: "alice".to_owned(),
        node: "n1".to_owned(),
        vm: vm.to_owned(),
        serial,
        expires_ms: NOW + 60_000,
        cores: 4,
        memory_mib: 1024,
        huge_2m_mib: 512,
        huge_1g_mib: 0,
        devices: vec![GrantedDevice { role: "gpu".to_owned(), address: format!("0000:0{serial}:00.0") }],
        numa: Vec::new(),
    }
}

fn all_of(grant: &Grant) -> Demand {
    Demand {
        cores: grant.cores,
        memory_mib: grant.memory_mib,
        huge_2m_mib: grant.huge_2m_mib,
        huge_1g_mib: grant.huge_1g_mib,
        devices: grant.devices.iter().map(|device| device.address.clone()).collect(),
    }
}

/// A bridge, and node n1 of 8 cores that knows it.
fn scene() -> (SecretKey, Host) {
    let (key, _) = SecretKey::generate().unwrap();
    let host = Host { node: "n1".to_owned(), cores: 8, keys: vec![key.public()] };
    (key, host)
}

#[test]
fn a_vm_is_started_once_into_its_grant_and_gives_it_back() {
    let (key, host) = scene();
    let (one, two) = (grant("a", 1), grant("b", 2));
    let mut book = Book::default();
    book.take(&host, &key.sign(&one).unwrap(), "a", &all_of(&one), NOW).unwrap();
    book.take(&host, &key.sign(&two).unwrap(), "b", &all_of(&two), NOW).unwrap();
    assert_eq!(book.vms().keys().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(book.end("a").unwrap().grant, one);
    assert_eq!(book.end("a"), None);
    // Its device and its cores are free, for another grant.
    let again = Grant { devices: one.devices.clone(), ..grant("c", 3) };
    book.take(&host, &key.sign(&again).unwrap(), "c", &all_of(&again), NOW).unwrap();
}

#[test]
fn whatever_is_refused_leaves_the_book_as_it_was() {
    let (key, host) = scene();
    let (stranger, _) = SecretKey::generate().unwrap();
    let mut book = Book::default();
    let held = grant("held", 1);
    let first = key.sign(&held).unwrap();
    book.take(&host, &first, "held", &all_of(&held), NOW).unwrap();
    let good = grant("vm", 2);
    let demand = all_of(&good);
    let of = |change: &dyn Fn(&mut Grant)| {
        let mut grant = good.clone();
        change(&mut grant);
        key.sign(&grant).unwrap()
    };
    let more = |change: &dyn Fn(&mut Demand)| {
        let mut demand = demand.clone();
        change(&mut demand);
        demand
    };
    let text = key.sign(&good).unwrap();
    let (body, signature) = text.split_once('.').unwrap();
    let other_body = of(&|g| g.cores = 64);
    let swapped = format!("{}.{signature}", other_body.split_once('.').unwrap().0);
    let cases: Vec<(String, Demand, &str)> = vec![
        (stranger.sign(&good).unwrap(), demand.clone(), "another one, or was changed"),
        (swapped, demand.clone(), "another one, or was changed"),
        (format!("{body}."), demand.clone(), "another one, or was changed"),
        (body.to_owned(), demand.clone(), "no dot"),
        (format!("%{body}.{signature}"), demand.clone(), "expected a grant"),
        (of(&|g| g.node = "n2".to_owned()), demand.clone(), "for node n2, and this is n1"),
        (of(&|g| g.vm = "other".to_owned()), demand.clone(), "for VM other"),
        (of(&|g| g.expires_ms = NOW - 5000), demand.clone(), "ended 5 s ago"),
        (of(&|g| g.expires_ms = NOW), demand.clone(), "ended 0 s ago"),
        (of(&|g| g.serial = 1), demand.clone(), "grant 1 of lease lease-of-vm was used before"),
        (text.clone(), more(&|d| d.cores = 5), "wants 5 cores, and lease lease-of-vm grants 4"),
        (text.clone(), more(&|d| d.memory_mib = 1025), "1025 MiB of memory"),
        (text.clone(), more(&|d| d.huge_2m_mib = 514), "514 MiB in pages of 2 MiB"),
        (text.clone(), more(&|d| d.huge_1g_mib = 1024), "1024 MiB in pages of 1 GiB"),
        (text.clone(), more(&|d| d.devices.push("0000:09:00.0".to_owned())), "does not grant"),
        (
            of(&|g| g.devices = held.devices.clone()),
            Demand::default(),
            "held by VM held of lease lease-of-held",
        ),
        (of(&|g| g.cores = 5), demand.clone(), "have 9 cores, and it has 8"),
    ];
    let before = book.clone();
    for (text, demand, wanted) in cases {
        let error = book.take(&host, &text, "vm", &demand, NOW).unwrap_err().to_string();
        assert!(error.contains(wanted), "wanted {wanted:?}, found {error:?}");
        assert_eq!(book, before, "{wanted}");
    }
    book.take(&host, &text, "vm", &demand, NOW).unwrap();
}

#[test]
fn a_grant_that_was_used_is_refused_as_long_as_it_lives_and_as_expired_after() {
    let (key, host) = scene();
    let one = grant("a", 1);
    let text = key.sign(&one).unwrap();
    let mut book = Book::default();
    book.take(&host, &text, "a", &all_of(&one), NOW).unwrap();
    book.end("a");
    // Also after a restart of the daemon that keeps the book.
    let written = serde_json::to_string(&book).unwrap();
    let mut book: Book = serde_json::from_str(&written).unwrap();
    let refused = book.take(&host, &text, "a", &all_of(&one), NOW + 59_999).unwrap_err();
    assert_eq!(refused, GrantError::Replayed { lease: "lease-of-a".to_owned(), serial: 1 });
    // What is not needed any more is forgotten with the next grant.
    let two = Grant { expires_ms: NOW + 120_000, ..grant("b", 2) };
    book.take(&host, &key.sign(&two).unwrap(), "b", &all_of(&two), NOW + 60_000).unwrap();
    assert!(!serde_json::to_string(&book).unwrap().contains("\"1\":"), "{book:?}");
    let refused = book.take(&host, &text, "a", &all_of(&one), NOW + 60_000).unwrap_err();
    assert!(matches!(refused, GrantError::Expired { .. }), "{refused}");
}

#[test]
fn keys_are_read_as_they_are_written() {
    let (key, text) = SecretKey::generate().unwrap();
    let again: SecretKey = text.parse().unwrap();
    assert_eq!(again.public(), key.public());
    assert_eq!(key.public().to_string().parse(), Ok(key.public()));
    assert!(!format!("{key:?}").contains(&text), "secrets are not shown");
    "short".parse::<SecretKey>().unwrap_err();
    let error = "short".parse::<vmove_grant::PublicKey>().unwrap_err().to_string();
    assert!(error.contains("expected 43 characters"), "{error}");
    // Two bridges, one of which is being replaced.
    let (new, _) = SecretKey::generate().unwrap();
    let host = Host { node: "n1".to_owned(), cores: 8, keys: vec![key.public(), new.public()] };
    let mut book = Book::default();
    for (key, vm, serial) in [(&key, "a", 1), (&new, "b", 2)] {
        let grant = grant(vm, serial);
        book.take(&host, &key.sign(&grant).unwrap(), vm, &all_of(&grant), NOW).unwrap();
    }
}
