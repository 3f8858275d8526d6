//! Device state between two real QEMUs that map the same RAM file.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::{sync::mpsc, time::Duration};
use vmove_types::time::Mono;

use common::{Bench, Couple, TIMEOUT, qemus, run_state};
use serde_json::Value;
use vmove_qmp::{
    Client,
    switchover::{
        Announce, Destination, DestinationOptions, GuestState, Hold, Inbound, Outbound, RelayStats, Source,
        SourceOptions, StateReceiver, StateSender, SwitchoverError, query_migration, relay,
    },
};

async fn destination(client: &Client) -> (Destination, StateSender) {
    let destination = Destination::prepare(client, &DestinationOptions::default()).await.unwrap();
    let (sender, fd) = StateSender::pair().unwrap();
    destination.listen(Inbound::Fd(fd)).await.unwrap();
    (destination, sender)
}

async fn source(client: &Client, hold: Hold) -> Source {
    Source::prepare(client, &SourceOptions::default().hold(hold)).await.unwrap()
}

/// Starts the stream from `source` into `sender`.
async fn stream(
    source: &Source,
    mut sender: StateSender,
) -> tokio::task::JoinHandle<std::io::Result<RelayStats>> {
    let (mut receiver, fd) = StateReceiver::pair().unwrap();
    source.start(Outbound::Fd(fd)).await.unwrap();
    tokio::spawn(async move { relay(&mut receiver, &mut sender).await })
}

/// The whole way, as a daemon goes it.
async fn switch(couple: &Couple, hold: Hold) -> Duration {
    let (destination, sender) = destination(&couple.destination).await;
    let source = source(&couple.source, hold).await;
    let (tell, told) = mpsc::channel();
    source.on_stop(move |at| tell.send((at, Mono::now())).unwrap());
    let carried = stream(&source, sender).await;
    let stopped = source.stopped(TIMEOUT).await.unwrap();
    assert!(stopped.was_running);
    let (told_at, called_at) = told.try_recv().expect("the callback runs before any waiter wakes");
    assert_eq!(told_at, stopped.at);
    assert!(called_at.since(told_at) < Duration::from_millis(50));
    let held = source.held(TIMEOUT).await.unwrap();
    assert!(held.at >= stopped.at);
    if hold == Hold::UntilTold {
        couple.assert_stopped().await;
        assert_eq!(query_migration(&couple.source, TIMEOUT).await.unwrap().status.name(), "pre-switchover");
        source.continue_().await.unwrap();
    }
    let completed = source.completed(TIMEOUT).await.unwrap();
    let loaded = destination.loaded(TIMEOUT).await.unwrap();
    couple.assert_stopped().await;
    let before = couple.count();
    let resumed = destination.resume(TIMEOUT).await.unwrap();
    assert!(resumed.at >= loaded.at && completed.at >= stopped.at);
    couple.assert_running().await;
    assert!(couple.count().count > before.count);
    assert_eq!(run_state(&couple.source).await, "postmigrate");
    assert_eq!(run_state(&couple.destination).await, "running");
    let stats = carried.await.unwrap().unwrap();
    assert!((20 << 10..4 << 20).contains(&stats.bytes), "{stats:?}: guest RAM must not be in it");
    destination.announce(Announce::default()).await.unwrap();
    loaded.at.since(stopped.at)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_guest_goes_on_at_the_destination() {
    for qemu in qemus() {
        for hold in [Hold::UntilTold, Hold::AtOnce, Hold::Never] {
            let mut bench = Bench::new(&qemu);
            let couple = bench.couple(&bench.guest(&[])).await;
            couple.assert_running().await;
            let took = switch(&couple, hold).await;
            eprintln!("{} {hold:?}: STOP to loaded {took:?} (50 ms of it in this test)", qemu.display());
            assert!(took < Duration::from_secs(2), "{took:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_ram_blocks_stay_out_of_the_stream() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let numa = [
            "-object",
            "memory-backend-ram,id=n0,size=32M",
            "-object",
            r#"{"qom-type":"memory-backend-memfd","id":"n1","size":33554432,"share":true}"#,
            "-numa",
            "node,memdev=n0",
            "-numa",
            "node,memdev=n1",
            "-smp",
            "2",
        ];
        let couple = bench.couple(&bench.guest(&numa)).await;
        assert_eq!(couple.ram.len(), 2);
        couple.assert_running().await;
        switch(&couple, Hold::Never).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_guest_stays_paused() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let couple = bench.couple(&bench.guest(&[])).await;
        couple.assert_running().await;
        couple.source.execute_raw("stop", Value::Null, TIMEOUT).await.unwrap();
        let (destination, sender) = destination(&couple.destination).await;
        let source = source(&couple.source, Hold::UntilTold).await;
        assert!(!source.was_running());
        let _carried = stream(&source, sender).await;
        assert!(!source.stopped(TIMEOUT).await.unwrap().was_running);
        source.continue_().await.unwrap();
        source.completed(TIMEOUT).await.unwrap();
        destination.loaded(TIMEOUT).await.unwrap();
        assert_eq!(run_state(&couple.destination).await, "paused");
        couple.assert_stopped().await;
        destination.resume(TIMEOUT).await.unwrap();
        couple.assert_running().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unix_sockets_work_as_well_as_descriptors() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let couple = bench.couple(&bench.guest(&[])).await;
        let to = Destination::prepare(&couple.destination, &DestinationOptions::default()).await.unwrap();
        let inbound = bench.base.join("in.sock");
        to.listen(Inbound::Unix(inbound.clone())).await.unwrap();
        let listener = tokio::net::UnixListener::bind(bench.base.join("out.sock")).unwrap();
        let from = source(&couple.source, Hold::AtOnce).await;
        from.start(Outbound::Unix(bench.base.join("out.sock"))).await.unwrap();
        let mut receiver = StateReceiver::accept(&listener).await.unwrap();
        let mut sender = StateSender::connect(&inbound).await.unwrap();
        relay(&mut receiver, &mut sender).await.unwrap();
        from.completed(TIMEOUT).await.unwrap();
        to.loaded(TIMEOUT).await.unwrap();
        to.resume(TIMEOUT).await.unwrap();
        couple.assert_running().await;
    }
}

/// After `guest` is back, everything must be as before: settings, and the ability to move.
async fn assert_as_before(bench: &mut Bench, couple: &mut Couple, settings: &[Value; 2]) {
    couple.assert_running().await;
    assert_eq!(run_state(&couple.source).await, "running");
    assert_eq!(&migration_settings(&couple.source).await, settings, "settings must be put back");
    couple.destination_process.kill().await.unwrap();
    (couple.destination_process, couple.destination) = bench.waiting(&bench.guest(&[])).await;
    switch(couple, Hold::Never).await;
}

async fn migration_settings(client: &Client) -> [Value; 2] {
    let ask = async |name| client.execute_raw(name, Value::Null, TIMEOUT).await.unwrap();
    [ask("query-migrate-capabilities").await, ask("query-migrate-parameters").await]
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_while_the_guest_runs() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let mut couple = bench.couple(&bench.guest(&["-device", "VGA"])).await;
        let settings = migration_settings(&couple.source).await;
        // 10 kB/s: QEMU sends for half a minute, the guest runs on.
        let mut slow = SourceOptions::default();
        slow.max_bandwidth = 10_000;
        let source = Source::prepare(&couple.source, &slow).await.unwrap();
        let (receiver, fd) = StateReceiver::pair().unwrap();
        source.start(Outbound::Fd(fd)).await.unwrap();
        let early = source.stopped(Duration::from_millis(50)).await;
        if matches!(early, Err(SwitchoverError::Timeout { .. })) {
            let cut = Mono::now();
            match source.cancel(TIMEOUT).await.unwrap() {
                GuestState::Running { resumed: None } => {}
                // QEMU 10.0 on a busy machine: once its stream is cut, it may take that for the end, stop the guest, and run it again.
                GuestState::Running { resumed: Some(at) } => assert!(at > cut, "it was stopped before"),
                state => panic!("{state:?}"),
            }
        } else {
            panic!("the guest stopped too early: {early:?}");
        }
        drop((receiver, source));
        assert_eq!(run_state(&couple.source).await, "running");
        assert_eq!(migration_settings(&couple.source).await, settings);
        couple.assert_running().await;
        // And again, this time to the end.
        couple.destination_process.kill().await.unwrap();
        (couple.destination_process, couple.destination) =
            bench.waiting(&bench.guest(&["-device", "VGA"])).await;
        switch(&couple, Hold::UntilTold).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_in_pre_switchover() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let mut couple = bench.couple(&bench.guest(&[])).await;
        let settings = migration_settings(&couple.source).await;
        let (_destination, sender) = destination(&couple.destination).await;
        let from = source(&couple.source, Hold::UntilTold).await;
        let _carried = stream(&from, sender).await;
        let held = from.held(TIMEOUT).await.unwrap();
        couple.assert_stopped().await;
        let state = from.cancel(TIMEOUT).await.unwrap();
        assert!(matches!(state, GuestState::Running { resumed: Some(at) } if at > held.at), "{state:?}");
        assert_as_before(&mut bench, &mut couple, &settings).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_on_the_source_after_completed() {
    for qemu in qemus() {
        for hold in [Hold::UntilTold, Hold::Never] {
            let mut bench = Bench::new(&qemu);
            let mut couple = bench.couple(&bench.guest(&[])).await;
            let settings = migration_settings(&couple.source).await;
            let (destination, sender) = destination(&couple.destination).await;
            let from = source(&couple.source, hold).await;
            let _carried = stream(&from, sender).await;
            from.held(TIMEOUT).await.unwrap();
            if hold == Hold::UntilTold {
                from.continue_().await.unwrap();
            }
            from.completed(TIMEOUT).await.unwrap();
            destination.loaded(TIMEOUT).await.unwrap();
            // The destination has loaded everything and never ran: make sure of that first.
            couple.destination_process.kill().await.unwrap();
            couple.assert_stopped().await;
            let state = from.resume_after_completed(TIMEOUT).await.unwrap();
            assert!(matches!(state, GuestState::Running { resumed: Some(_) }), "{state:?}");
            assert_as_before(&mut bench, &mut couple, &settings).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_guest_is_paused_after_cancel_and_can_move_again() {
    for qemu in qemus() {
        for (hold, to_the_end) in [(Hold::UntilTold, false), (Hold::UntilTold, true), (Hold::Never, true)] {
            let mut bench = Bench::new(&qemu);
            let mut couple = bench.couple(&bench.guest(&[])).await;
            couple.assert_running().await;
            couple.source.execute_raw("stop", Value::Null, TIMEOUT).await.unwrap();
            let (_destination, sender) = destination(&couple.destination).await;
            let from = source(&couple.source, hold).await;
            let _carried = stream(&from, sender).await;
            from.held(TIMEOUT).await.unwrap();
            if to_the_end {
                if hold == Hold::UntilTold {
                    from.continue_().await.unwrap();
                }
                from.completed(TIMEOUT).await.unwrap();
            }
            couple.destination_process.kill().await.unwrap();
            assert_eq!(from.cancel(TIMEOUT).await.unwrap(), GuestState::Paused);
            assert_eq!(run_state(&couple.source).await, "paused");
            couple.assert_stopped().await;
            couple.source.execute_raw("cont", Value::Null, TIMEOUT).await.unwrap();
            (couple.destination_process, couple.destination) = bench.waiting(&bench.guest(&[])).await;
            switch(&couple, hold).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_earlier_life_left_the_guest_in_the_midst() {
    for qemu in qemus() {
        for completed in [false, true] {
            let mut bench = Bench::new(&qemu);
            let mut couple = bench.couple(&bench.guest(&[])).await;
            let (destination, sender) = destination(&couple.destination).await;
            let from = source(&couple.source, Hold::UntilTold).await;
            let carried = stream(&from, sender).await;
            from.held(TIMEOUT).await.unwrap();
            if completed {
                from.continue_().await.unwrap();
                from.completed(TIMEOUT).await.unwrap();
                destination.loaded(TIMEOUT).await.unwrap();
            }
            // All that the earlier life had dies with it.
            carried.abort();
            let _ = carried.await;
            drop((from, destination));
            let path = couple.source.path().to_owned();
            couple.source = {
                drop(std::mem::replace(&mut couple.source, couple.destination.clone()));
                Client::connect(&path, TIMEOUT).await.unwrap()
            };
            couple.destination_process.kill().await.unwrap();

            let found = Source::attach(&couple.source, true).await.unwrap();
            couple.assert_stopped().await;
            let state = found.cancel(TIMEOUT).await.unwrap();
            assert!(matches!(state, GuestState::Running { .. }), "{state:?}");
            couple.assert_running().await;
            (couple.destination_process, couple.destination) = bench.waiting(&bench.guest(&[])).await;
            switch(&couple, Hold::Never).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn destination_killed_in_load() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let mut couple = bench.couple(&bench.guest(&[])).await;
        let settings = migration_settings(&couple.source).await;
        let (destination, mut sender) = destination(&couple.destination).await;
        let from = source(&couple.source, Hold::UntilTold).await;
        let (mut receiver, fd) = StateReceiver::pair().unwrap();
        from.start(Outbound::Fd(fd)).await.unwrap();
        let process = couple.destination_process.clone();
        let carried = tokio::spawn(async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            // A part of the stream, then the destination dies, then the relay notices.
            let mut part = vec![0; 30_000];
            receiver.read_exact(&mut part).await?;
            sender.write_all(&part).await?;
            process.kill().await.unwrap();
            relay(&mut receiver, &mut sender).await
        });
        let gone = destination.loaded(TIMEOUT).await.unwrap_err();
        assert!(matches!(gone, SwitchoverError::Gone { .. }), "{gone:?}");
        assert!(carried.await.unwrap().is_err(), "the relay must notice that nobody reads");
        let state = from.cancel(TIMEOUT).await.unwrap();
        assert!(matches!(state, GuestState::Running { .. }), "{state:?}");
        assert_as_before(&mut bench, &mut couple, &settings).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_cut_while_devices_are_sent() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let mut couple = bench.couple(&bench.guest(&[])).await;
        let settings = migration_settings(&couple.source).await;
        let (_destination, sender) = destination(&couple.destination).await;
        let from = source(&couple.source, Hold::UntilTold).await;
        let carried = stream(&from, sender).await;
        from.held(TIMEOUT).await.unwrap();
        carried.abort();
        let _ = carried.await;
        from.continue_().await.unwrap();
        let failed = from.completed(TIMEOUT).await.unwrap_err();
        assert!(matches!(failed, SwitchoverError::Failed { .. }), "{failed:?}");
        let state = from.cancel(TIMEOUT).await.unwrap();
        assert!(matches!(state, GuestState::Running { .. }), "{state:?}");
        assert_as_before(&mut bench, &mut couple, &settings).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_fails_the_load_and_says_so() {
    use tokio::io::AsyncWriteExt;
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let (process, client) = {
            let couple = bench.couple(&bench.guest(&[])).await;
            (couple.destination_process, couple.destination)
        };
        let survives = client.version().major >= 10;
        let (destination, mut sender) = destination(&client).await;
        sender.write_all(b"this is not a migration stream").await.unwrap();
        let error = destination.loaded(TIMEOUT).await.unwrap_err();
        if survives {
            assert!(matches!(error, SwitchoverError::Failed { .. }), "{error:?}");
            assert!(error.to_string().contains("load of migration failed"), "{error}");
            assert!(process.alive());
        } else {
            assert!(matches!(error, SwitchoverError::Gone { .. }), "{error:?}");
            tokio::time::timeout(TIMEOUT, process.exited()).await.unwrap();
            assert!(process.log_tail().contains("Not a migration stream"), "{}", process.log_tail());
        }
        let cont = destination.resume(TIMEOUT).await;
        assert!(cont.is_err(), "a guest that was not loaded must not run: {cont:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_states_are_refused() {
    for qemu in qemus() {
        let mut bench = Bench::new(&qemu);
        let couple = bench.couple(&bench.guest(&[])).await;
        let running = Destination::prepare(&couple.source, &DestinationOptions::default()).await;
        assert!(matches!(running, Err(SwitchoverError::RunState { .. })), "{running:?}");
        let waiting = Source::prepare(&couple.destination, &SourceOptions::default()).await;
        assert!(matches!(waiting, Err(SwitchoverError::RunState { .. })), "{waiting:?}");

        let (_destination, sender) = destination(&couple.destination).await;
        let first = source(&couple.source, Hold::UntilTold).await;
        assert!(first.continue_().await.is_err());
        let _carried = stream(&first, sender).await;
        first.held(TIMEOUT).await.unwrap();
        let second = Source::prepare(&couple.source, &SourceOptions::default()).await;
        assert!(matches!(second, Err(SwitchoverError::Busy { .. })), "{second:?}");
        first.cancel(TIMEOUT).await.unwrap();
        couple.assert_running().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_taken_by_resume_and_given_back_by_cancel() {
    for qemu in qemus() {
        for hold in [Hold::UntilTold, Hold::Never] {
            let mut bench = Bench::new(&qemu);
            let disk = bench.base.join("disk.raw");
            std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
            let drive = format!("file={},if=none,id=d0,format=raw", disk.display());
            let options = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0"];
            let line = bench.guest(&options);
            let couple = bench.couple(&line).await;
            let (destination, sender) = destination(&couple.destination).await;
            let from = source(&couple.source, hold).await;
            let _carried = stream(&from, sender).await;
            from.held(TIMEOUT).await.unwrap();
            if hold == Hold::UntilTold {
                from.continue_().await.unwrap();
            }
            from.completed(TIMEOUT).await.unwrap();
            destination.loaded(TIMEOUT).await.unwrap();
            // Loaded, but the disk is not taken: the source can have it back while the destination still lives.
            from.resume_after_completed(TIMEOUT).await.unwrap();
            couple.assert_running().await;
            // Now the disk is in use there.
            let refused = destination.resume(TIMEOUT).await.unwrap_err();
            assert!(matches!(refused, SwitchoverError::Qmp { .. }), "{refused:?}");
            assert_eq!(run_state(&couple.source).await, "running");
            couple.destination_process.kill().await.unwrap();

            let (process, client) = bench.waiting(&line).await;
            let couple = Couple { destination: client, destination_process: process, ..couple };
            switch(&couple, hold).await;
            couple.source_process.quit(Some(&couple.source), TIMEOUT).await.unwrap();
            couple.destination_process.quit(Some(&couple.destination), TIMEOUT).await.unwrap();
        }
    }
}
