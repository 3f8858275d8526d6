//! The page of `vmove page` in a Chromium: real daemons, a real guest that moves and is forked. A layer of its own: `./run test page`.

mod access;
mod forks;
mod hostile;
mod lost;
mod many;
mod moves;
mod served;
