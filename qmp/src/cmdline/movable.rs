//! Rewriting a command line on the node where the guest starts.

use super::{
    CommandLine, CommandLineError, Item, Obstacle, RamFileSpec, RunLayout, destination, layout, options,
};

impl CommandLine {
    /// Makes a guest that can be moved of this: placeholders filled in, all RAM in shared files, a monitor for vmove, a
    /// name, and the filter of system calls that the layout asks for. Returns the RAM files; they need not exist, QEMU makes them.
    ///
    /// RAM given by `-m` alone becomes back end `vmove-ram0`. Back ends of other kinds become files under their own id.
    /// A shared file that is named already stays where it is.
    ///
    /// # Errors
    /// [`CommandLineError::NotMovable`] with all obstacles, [`CommandLineError::Unreadable`],
    /// [`CommandLineError::SocketPath`]. The command line is then partly rewritten: drop it.
    pub fn rewrite_movable(&mut self, layout: &RunLayout) -> Result<Vec<RamFileSpec>, CommandLineError> {
        let obstacles = self.obstacles_at_start()?;
        if !obstacles.is_empty() {
            return Err(CommandLineError::NotMovable(obstacles));
        }
        self.rewrite(layout, false)
    }

    fn own_socket_is_free(&self, layout: &RunLayout) -> Result<(), CommandLineError> {
        let own = layout.vm_dir.join(&layout.qmp_socket);
        let mut taken = Vec::new();
        for item in &self.items {
            let path = destination::listening_path(item)?;
            if path.is_some_and(|path| layout.vm_dir.join(path) == own) {
                let reason = "vmove needs this path for a monitor of its own";
                taken.push(Obstacle::of(item, reason, "use another name for the socket"));
            }
        }
        if taken.is_empty() { Ok(()) } else { Err(CommandLineError::NotMovable(taken)) }
    }

    pub(super) fn rewrite(
        &mut self,
        layout: &RunLayout,
        relocate: bool,
    ) -> Result<Vec<RamFileSpec>, CommandLineError> {
        self.substitute(layout);
        self.own_socket_is_free(layout)?;
        let ram = self.share_ram(layout, relocate)?;
        if self.guest_name().is_none() {
            let name = options::escape(&layout.name);
            self.items.push(Item::new("-name", format!("guest={name}")));
        }
        self.filter_calls(&layout.confinement);
        self.items.push(layout::own_monitor(layout)?);
        Ok(ram)
    }
}
