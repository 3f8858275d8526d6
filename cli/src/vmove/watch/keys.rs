//! What keys do. None changes anything but what is shown.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::board::{Board, View};

/// Lines of a page.
const PAGE: u16 = 10;

/// What comes after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It goes on.
    Goes,
    /// The user has seen enough.
    End,
}

/// Does what a key asks for.
pub fn press(board: &mut Board, key: KeyEvent) -> Then {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match (key.code, board.view) {
        (KeyCode::Char('c'), _) if control => return Then::End,
        (KeyCode::Char('q'), _) => return Then::End,
        (KeyCode::Char('?'), View::Help) | (KeyCode::Esc, _) => board.view = View::List,
        (KeyCode::Char('?'), _) => board.view = View::Help,
        (KeyCode::Enter, View::List) if board.chosen.is_some() => board.view = View::Details(0),
        (KeyCode::Enter, _) => board.view = View::List,
        (code, View::List) => {
            if let Some(by) = lines(code) {
                board.choose(by);
            }
        }
        (code, View::Details(from)) => {
            if let Some(by) = lines(code) {
                let by = i16::try_from(by).unwrap_or(if by < 0 { i16::MIN } else { i16::MAX });
                board.view = View::Details(from.saturating_add_signed(by));
            }
        }
        (_, View::Help) => {}
    }
    Then::Goes
}

/// How many lines a key goes down.
fn lines(code: KeyCode) -> Option<isize> {
    Some(match code {
        KeyCode::Down | KeyCode::Char('j') => 1,
        KeyCode::Up | KeyCode::Char('k') => -1,
        KeyCode::PageDown | KeyCode::Char(' ') => isize::try_from(PAGE).unwrap_or(1),
        KeyCode::PageUp => -isize::try_from(PAGE).unwrap_or(1),
        KeyCode::Home | KeyCode::Char('g') => isize::MIN / 2,
        KeyCode::End | KeyCode::Char('G') => isize::MAX / 2,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::board::{Key, Kind};
    use super::*;

    fn press_code(board: &mut Board, code: KeyCode) -> Then {
        press(board, KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_choose_show_and_go_back() {
        let mut board = Board::new(vec!["a".to_owned()]);
        let key = |id: &str| Key { node: 0, kind: Kind::Vm, id: id.to_owned() };
        press_code(&mut board, KeyCode::Enter);
        assert_eq!(board.view, View::List, "nothing is chosen");
        board.choices = vec![key("x"), key("y")];
        for code in [KeyCode::Down, KeyCode::Char('j')] {
            press_code(&mut board, code);
        }
        assert_eq!(board.chosen, Some(key("y")));
        press_code(&mut board, KeyCode::Enter);
        press_code(&mut board, KeyCode::Down);
        assert_eq!(board.view, View::Details(1));
        press_code(&mut board, KeyCode::Home);
        assert_eq!(board.view, View::Details(0));
        press_code(&mut board, KeyCode::Esc);
        press_code(&mut board, KeyCode::Char('?'));
        assert_eq!(board.view, View::Help);
        press_code(&mut board, KeyCode::Char('?'));
        assert_eq!(board.view, View::List);
        for other in [KeyCode::Char('x'), KeyCode::Char('d'), KeyCode::F(5), KeyCode::Tab, KeyCode::Delete] {
            assert_eq!(press_code(&mut board, other), Then::Goes);
            assert_eq!((board.view, board.chosen.clone()), (View::List, Some(key("y"))));
        }
        assert_eq!(press_code(&mut board, KeyCode::Char('q')), Then::End);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(press(&mut board, control_c), Then::End);
    }
}
