//! Lines that a journal owes: what they tell of is done, since it was safe without them. They are written as soon as the disk takes them.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio::time::sleep;
use tracing::Instrument as _;

use crate::publish::Publisher;
use vmove_node::journal::Journal;

/// Between attempts to write.
pub(crate) const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Tries until the journal owes nothing, and tells the operator meanwhile. Nothing else may be left to do that needs the VM: an operator may
/// end it meanwhile. Cancel-safe.
pub(crate) async fn write_owed<R>(journal: &mut Journal<R>, publisher: &Publisher)
where
    R: Serialize + DeserializeOwned + Clone,
{
    while let Err(error) = journal.write_owed() {
        publisher.cannot_write(journal.path(), &error);
        publisher.only_owes();
        sleep(TRY_AGAIN).await;
    }
    publisher.can_write();
}

/// The same in a task of its own, for a line that nobody waits for. The receiver hears when it is written.
pub(crate) fn write_later<R>(mut journal: Journal<R>) -> oneshot::Receiver<()>
where
    R: Serialize + DeserializeOwned + Clone + Send + 'static,
{
    let (written, is_written) = oneshot::channel();
    let writing = async move {
        let mut told = false;
        while let Err(error) = journal.write_owed() {
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(path = %journal.path().display(), %error, "cannot write a journal; trying again");
            }
            sleep(TRY_AGAIN).await;
        }
        let _ = written.send(());
    };
    vmove_node::task::spawn(writing.in_current_span());
    is_written
}

/// Tries until no line of a step that was not taken can be in the file.
pub(crate) async fn cut_back<R>(journal: &mut Journal<R>, publisher: &Publisher)
where
    R: Serialize + DeserializeOwned + Clone,
{
    while journal.is_unsure() {
        let Err(error) = journal.cut_back() else { break };
        publisher.cannot_write(journal.path(), &error);
        sleep(TRY_AGAIN).await;
    }
}
