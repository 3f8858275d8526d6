//! The pages of `vmove page` and `vmove fleet page` in a Chromium: real daemons, a real guest that moves and is forked, a real bridge. A layer of its own: `./run test page`.

mod access;
mod fleet;
mod forks;
mod hostile;
mod lost;
mod many;
mod moves;
mod served;
