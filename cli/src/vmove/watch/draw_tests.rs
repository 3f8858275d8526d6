//! What the screen shows, from states that daemons with real guests have told.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use serde::Deserialize;

use super::super::feed::News;
use super::*;
use crate::vmove::report::tests::finished;

/// What a daemon told, as `tests/tests/moves/watching.rs` records it.
#[derive(Deserialize)]
struct Told {
    vms: Vec<VmSummary>,
    live: Vec<Progress>,
    forks: Vec<ForkProgress>,
}

fn told(json: &str) -> Told {
    serde_json::from_str(json).expect("it was recorded")
}

fn moving() -> Told {
    told(include_str!("testdata/moving.json"))
}

fn board(told: Told) -> Board {
    let mut board = Board::new(vec!["a".to_owned()]);
    let Told { vms, live, forks } = told;
    board.take(News::Past(0, vec![finished()]), Instant::now());
    board.take(News::Lists { node: 0, vms, live, forks }, Instant::now());
    board
}

fn shown_by(board: &mut Board, palette: Palette, columns: u16, rows: u16, now: Instant) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a screen");
    terminal.draw(|frame| draw(frame, board, &palette, now)).expect("it is drawn");
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width);
    let symbols: Vec<&str> = buffer.content.iter().map(|cell| cell.symbol()).collect();
    symbols.chunks(width).map(|row| row.concat().trim_end().to_owned()).collect()
}

fn shown(board: &mut Board, columns: u16, rows: u16) -> Vec<String> {
    lines(&shown_by(board, Palette { colours: true }, columns, rows, Instant::now()))
}

#[test]
fn a_wide_screen_has_the_time_left_and_all_traces_in_a_line() {
    let lines = shown(&mut board(moving()), 120, 12);
    assert_eq!(lines[0], "a: 1 VM, 1 migration at work");
    assert_eq!(lines[1], "  guest → b: 9.96 s left, rounds 1");
    assert_eq!(lines[2], "    [==                      ] 8 %, 26.52 MiB of 320.00 MiB");
    assert!(
        lines[3].contains("rate") && lines[3].contains("29.46 MiB/s") && lines[3].contains("293.48 MiB"),
        "{lines:?}"
    );
    assert_eq!(lines[4], "  guest  running    320.00 MiB");
    assert_eq!(lines[6], "    guest → b: done, down 9.3 ms, 11.78 s in all, 22:49:37");
    assert_eq!(lines[11], "q end  ? help  Enter details  j k choose");
}

#[test]
fn a_narrow_screen_has_the_same_below_each_other() {
    let mut board = board(moving());
    let lines = shown(&mut board, 40, 14);
    assert_eq!(lines[1], "  guest → b: 9.96 s left, rounds 1");
    assert!(lines[2].ends_with("] 8 %"), "{lines:?}");
    let begin = |line: &String| line.split_whitespace().next().unwrap_or_default().to_owned();
    assert_eq!(lines[3..6].iter().map(begin).collect::<Vec<_>>(), ["rate", "left", "dirtied"], "{lines:?}");
    assert!(
        lines[3].ends_with("MiB/s") && lines[4].ends_with("MiB") && lines[5].ends_with("pages/s"),
        "{lines:?}"
    );
    // However small, it is drawn.
    for (columns, rows) in [(1, 1), (3, 2), (10, 3), (20, 200), (500, 1)] {
        shown(&mut board, columns, rows);
    }
}

#[test]
fn without_vms_it_says_what_to_do() {
    let mut board = Board::new(vec!["a".to_owned()]);
    assert_eq!(shown(&mut board, 60, 4)[0], "a: asked");
    board.take(News::Lists { node: 0, vms: Vec::new(), live: Vec::new(), forks: Vec::new() }, Instant::now());
    let lines = shown(&mut board, 60, 4);
    assert_eq!(lines[..2], ["a: 0 VMs, 0 migrations at work", "  no VMs; start one by `vmove run`"]);
}

#[test]
fn of_many_vms_the_chosen_one_is_on_the_screen() {
    let mut told = moving();
    let one = told.vms.remove(0);
    told.vms = (0..1000).map(|number| VmSummary { name: format!("vm{number:04}"), ..one.clone() }).collect();
    let mut board = board(told);
    shown(&mut board, 80, 24);
    assert_eq!(board.choices.len(), 1002);
    for (by, name) in [(1, "guest → b"), (500, "vm0499"), (-100, "vm0399"), (1, "vm0400")] {
        board.choose(by);
        let buffer = shown_by(&mut board, Palette { colours: true }, 80, 24, Instant::now());
        let reversed = |at: usize| buffer.content[at * 80].modifier.contains(Modifier::REVERSED);
        let lines = lines(&buffer);
        let chosen: Vec<_> = (0..23).filter(|at| reversed(*at)).collect();
        assert!(chosen.len() == 1 && lines[chosen[0]].contains(name), "{name}: {chosen:?} {lines:?}");
    }
}

#[test]
fn a_lost_daemon_is_told_with_what_was() {
    let mut board = board(moving());
    let now = Instant::now();
    board.take(News::Lost(0, "vmoved cannot be reached; start it (systemctl start vmoved)".to_owned()), now);
    let buffer = shown_by(&mut board, Palette { colours: true }, 70, 12, now + Duration::from_secs(7));
    let lines = lines(&buffer);
    assert_eq!(lines[0], "a: LOST for 7 s, waiting for it; below is what was");
    assert!(lines[1].contains("systemctl start vmoved") && lines[2].contains("guest → b"), "{lines:?}");
    assert_eq!(buffer.content[0].fg, Color::Red);
}

#[test]
fn a_fork_has_its_children_below_it() {
    let mut board = board(told(include_str!("testdata/forked.json")));
    let lines = shown(&mut board, 80, 20);
    let at =
        lines.iter().position(|line| line == "  guest: fork, 2 of 2 children run, done").expect("the fork");
    assert!(
        lines[at + 1].starts_with("    guest.1  ran after ")
            && lines[at + 2].starts_with("    guest.2  ran after ")
    );
}

#[test]
fn no_color_is_respected() {
    let mut board = board(moving());
    board.choose(1);
    let coloured = |buffer: &Buffer| {
        buffer.content.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    for (colours, expected) in [(true, true), (false, false)] {
        for view in [View::List, View::Help, View::Details(0)] {
            board.view = view;
            let buffer = shown_by(&mut board, Palette { colours }, 80, 24, Instant::now());
            assert!(!coloured(&buffer) || expected, "{view:?}");
            assert!(view != View::List || coloured(&buffer) == expected);
        }
    }
}

#[test]
fn details_are_the_report_and_scroll_to_its_end_and_no_further() {
    let mut board = board(moving());
    shown(&mut board, 80, 24);
    board.choose(isize::MAX / 2);
    board.view = View::Details(0);
    let lines = shown(&mut board, 80, 24);
    assert!(
        lines[0].contains("migration dc263ef0") && lines.iter().any(|line| line.starts_with("downtime")),
        "{lines:?}"
    );
    board.view = View::Details(u16::MAX);
    let lines = shown(&mut board, 80, 24);
    assert!(lines.iter().any(|line| line.contains("The slowest page faults")), "{lines:?}");
    assert!(matches!(board.view, View::Details(from) if from < 100));
    board.nodes[0].ended.clear();
    assert!(shown(&mut board, 80, 24)[0].contains("not here any more"));
}

#[test]
fn the_destination_shows_its_faults() {
    let mut told = moving();
    let faults =
        vmove_types::report::FaultStats { count: 40, fetched: 26, p99_us: 117.0, ..Default::default() };
    told.live[0].faults = Some(faults);
    (told.live[0].role, told.live[0].phase) = (Role::Destination, Phase::Fetch);
    let lines = shown(&mut board(told), 60, 12);
    assert_eq!(lines[1], "  guest ← b: 9.96 s left, fetch");
    assert!(lines[6].starts_with("    faults") && lines[6].ends_with("26 fetched, p99 117 us"), "{lines:?}");
}

#[test]
fn a_long_name_does_not_hide_what_its_vm_does() {
    let mut told = moving();
    told.vms[0].name = "a-name-of-forty-characters-and-some-more".to_owned();
    let lines = shown(&mut board(told), 40, 12);
    assert!(
        lines.iter().any(|line| line.starts_with("  a-name-of-") && line.ends_with("running    320.00 MiB")),
        "{lines:?}"
    );
}

#[test]
fn several_nodes_show_only_the_newest_that_have_ended() {
    let mut board = Board::new(vec!["a".to_owned(), "b".to_owned()]);
    let past = |number: u32| Progress { id: number.to_string(), ..finished() };
    for node in 0..2 {
        board.take(News::Past(node, (0..30).map(past).collect()), Instant::now());
    }
    let lines = shown(&mut board, 100, 60);
    assert_eq!(lines.iter().filter(|line| line.contains("done, down")).count(), 2 * ENDED_OF_SEVERAL);
}
