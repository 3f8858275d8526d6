//! Once warm, READs and WRITEs allocate nothing, on either side.
#![allow(missing_docs, unsafe_code, clippy::tests_outside_test_module)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use support::{Kind, Memory, Pair, pair, read_segment, write_segment};
use vmove_fabric::{Access, Class, Region, WrId};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Eight READs, half of them of what has changed, and eight WRITEs, single pages and many.
fn round(pair: &mut Pair, ours: &Region, theirs: &Region) {
    for n in 0..8 {
        let at = n * 64 * 4096;
        let mut reads = [read_segment(theirs, 0, ours, 0, 1); 64];
        let mut writes = [write_segment(ours, 0, theirs, 0, 1); 64];
        for page in 0..64 {
            reads[page] = read_segment(theirs, at + page * 4096, ours, page * 4096, 4096);
            writes[page] = write_segment(ours, at + page * 4096, theirs, page * 4096, 4096);
        }
        let count = if n % 2 == 0 { 1 } else { 64 };
        let endpoint = &mut pair.asking.endpoint;
        let reads = &reads[..count];
        let posted = if n < 4 {
            endpoint.post_read(WrId(1), reads)
        } else {
            endpoint.post_read_changed(WrId(1), reads)
        };
        posted.unwrap();
        pair.asking.endpoint.post_write(WrId(2), &writes[..count]).unwrap();
    }
    let mut done = 0;
    while done < 16 {
        done += pair.asking.endpoint.poll(&mut pair.asking.found).unwrap();
        for completion in pair.asking.found.drain() {
            completion.status.unwrap();
        }
        assert_eq!(pair.asked.endpoint.poll(&mut pair.asked.found).unwrap(), 0);
    }
}

#[test]
fn reads_and_writes_allocate_nothing_once_warm() {
    for kind in [Kind::Tcp, Kind::Local] {
        let mut pair = pair(kind, Class::Bulk);
        let access = Access { remote_read: true, remote_write: true };
        let (mine, yours) = (Memory::filled(4 << 20, 1), Memory::filled(4 << 20, 2));
        let ours = mine.register(&*pair.asking.fabric, access);
        let theirs = yours.register(&*pair.asked.fabric, access);
        for _ in 0..20 {
            round(&mut pair, &ours, &theirs);
        }
        let before = COUNT.with(Cell::get);
        for _ in 0..20 {
            round(&mut pair, &ours, &theirs);
        }
        let after = COUNT.with(Cell::get);
        assert_eq!(after - before, 0, "allocations of {kind:?}");
    }
}
