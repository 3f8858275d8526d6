//! The terminal: taken, and given back as it was, whatever happens.

use std::io;
use std::time::Instant;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use tokio::sync::mpsc;

use super::board::Board;
use super::draw::{Palette, draw};

/// The terminal in raw mode, on its other screen. Dropped, it is as before; a panic gives it back first, too.
pub struct Screen(DefaultTerminal);

/// What the user did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Pressed a key.
    Key(KeyEvent),
    /// Made the terminal larger or smaller.
    Resized,
}

impl Screen {
    pub fn open() -> io::Result<Self> {
        ratatui::try_init().map(Self).inspect_err(|_| ratatui::restore())
    }

    pub fn draw(&mut self, board: &mut Board, palette: &Palette, now: Instant) -> io::Result<()> {
        self.0.draw(|frame| draw(frame, board, palette, now)).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Keys as they come. It ends with the terminal. Reading blocks, so a thread does it, which ends with the process.
pub fn inputs() -> mpsc::UnboundedReceiver<Input> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            let input = match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => Input::Key(key),
                Event::Resize(..) => Input::Resized,
                _ => continue,
            };
            if sender.send(input).is_err() {
                return;
            }
        }
    });
    receiver
}
