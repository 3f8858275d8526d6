//! Forks a warm guest, gives each child its share of a job over a serial port, gathers the answers and ends the children.
//!
//! fork_and_gather SOCKET VM COUNT    SOCKET is that of vmoved on this host. The guest waits for a line `SHARE OF` on its second serial port, which its
//!                                    command line has as `-chardev socket,id=job,path={vmdir}/job.sock,server=on,wait=off -serial chardev:job`, and
//!                                    answers with a line `SHARE RESULT`, where RESULT is a number. The sum is printed.

use std::error::Error;
use std::num::ParseIntError;
use std::path::Path;
use std::process::ExitCode;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use vmove_client::Client;
use vmove_types::fork::ForkRequest;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, vm, count] = words.as_slice() else { return Err("fork_and_gather SOCKET VM COUNT".into()) };
    let node = Client::connect(socket);
    let request = ForkRequest { vm: Some(vm.clone()), count: count.parse()?, ..ForkRequest::default() };
    let fork = node.fork(&request).await?;
    let of = fork.children.len();
    println!("{of} children, {vm} was paused for {:.1} ms", fork.parent_pause_ms);
    // All of them work at the same time.
    let mut working = JoinSet::new();
    for (share, child) in fork.children.into_iter().enumerate() {
        let node = node.clone();
        working.spawn(async move {
            let result = work(&node, &child.name, share, of).await;
            let ended = node.kill_child(&child.name).await.map_err(|error| error.to_string());
            (child.name, result.and_then(|result| ended.map(|_| result)))
        });
    }
    let (mut sum, mut all_done) = (0, true);
    while let Some(done) = working.join_next().await {
        match done? {
            (_, Ok(result)) => sum += result,
            (child, Err(why)) => {
                println!("{child} did not do its share: {why}");
                all_done = false;
            }
        }
    }
    println!("sum: {sum}");
    Ok(if all_done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Gives a child its share, and waits for its answer.
async fn work(node: &Client, child: &str, share: usize, of: usize) -> Result<u64, String> {
    let text = |error: &dyn Error| error.to_string();
    let job = node.vm(child).await.map_err(|error| text(&error))?.dir.join("job.sock");
    let answer = ask(&job, &format!("{share} {of}\n")).await.map_err(|error| text(&error))?;
    let words: Vec<&str> = answer.split_whitespace().collect();
    match words.as_slice() {
        [number, result] if *number == share.to_string() => {
            result.parse().map_err(|error: ParseIntError| text(&error))
        }
        _ => Err(format!("expected {share} and a number, found {answer:?}")),
    }
}

async fn ask(port: &Path, line: &str) -> std::io::Result<String> {
    let mut port = BufReader::new(UnixStream::connect(port).await?);
    port.write_all(line.as_bytes()).await?;
    let mut answer = String::new();
    port.read_line(&mut answer).await?;
    Ok(answer)
}
