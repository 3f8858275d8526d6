//! A [guest of a few hundred instructions](vmove_tests::payload), under KVM and emulated: moves, forks, and what is killed meanwhile.

mod event_figures;
mod faults;
mod forks;
mod moves;
mod payload;
