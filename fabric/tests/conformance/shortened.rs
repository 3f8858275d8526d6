//! Memory of files that somebody shortens.

use vmove_fabric::{Access, Class, RemoteStatus, WrId};

use crate::support::{Kind, Memory, Pair, pair, read_segment, write_segment};

on_every_fabric! {
    zeros_in_the_place_of_lost_memory_are_not_delivered
    what_arrives_in_lost_memory_is_refused
}

const PAGE: usize = 4096;

/// The second half is cut off, and zeros are in the place of a page of it.
fn half_lost() -> Memory {
    let memory = Memory::of_file(8 * PAGE, 1);
    memory.shorten(4 * PAGE);
    assert_eq!(memory.read(6 * PAGE, 2), [0, 0]);
    memory
}

fn read(pair: &mut Pair, source: &Memory, target: &Memory) -> Result<(), RemoteStatus> {
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    let segment = read_segment(&from, 6 * PAGE, &to, 6 * PAGE, PAGE);
    pair.asking.endpoint.post_read(WrId(1), &[segment]).unwrap();
    pair.drive(1, 0).0[0].status
}

fn zeros_in_the_place_of_lost_memory_are_not_delivered(kind: Kind) {
    if !kind.answers_by_program() {
        return; // the kernel or a device reads them, and asks nobody
    }
    let mut pair = pair(kind, Class::Bulk);
    let found = read(&mut pair, &half_lost(), &Memory::new(8 * PAGE));
    assert_eq!(found, Err(RemoteStatus::Fault));
    // Other memory can be read as before.
    read(&mut pair, &Memory::of_file(8 * PAGE, 2), &Memory::new(8 * PAGE)).unwrap();
}

fn what_arrives_in_lost_memory_is_refused(kind: Kind) {
    if kind == Kind::Verbs {
        return; // a device writes to the pages that it has pinned
    }
    let mut pair = pair(kind, Class::Bulk);
    let target = half_lost();
    let found = read(&mut pair, &Memory::filled(8 * PAGE, 3), &target);
    assert!(matches!(found, Err(RemoteStatus::Fault | RemoteStatus::LocalGone)), "{found:?}");
    let source = Memory::filled(8 * PAGE, 4);
    read(&mut pair, &source, &Memory::of_file(8 * PAGE, 5)).unwrap();
    if kind.answers_by_program() {
        let to = target.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
        let from = source.register(&*pair.asking.fabric, Access::LOCAL);
        let segment = write_segment(&from, 0, &to, 6 * PAGE, PAGE);
        pair.asking.endpoint.post_write(WrId(2), &[segment]).unwrap();
        assert_eq!(pair.drive(1, 0).0[0].status, Err(RemoteStatus::Fault));
    }
}
