//! One job over many copies of a machine: each computes a slice, the parent gathers the results.

use std::ops::Range;
use std::time::Duration;

use vmove_guest::config::Config;
use vmove_guest::pattern::mix;

use crate::port::Port;

/// Numbers that are hashed and added up.
const NUMBERS: u64 = 240_000;
/// The machine forks itself so often, one time after the other.
const ROUNDS: u64 = 2;

pub fn run(mut port: Port, config: &Config) -> Result<(), String> {
    if config.misbehave {
        misbehave(&mut port)?;
    }
    if config.fork > 0 && (config.hold_s > 0 || config.nest > 0) {
        if share(&mut port, config, 0)? {
            println!("VMOVE-GUEST JOB done");
        }
        return Ok(());
    }
    if config.fork > 0 {
        // One that is killed before the rounds.
        let answer = port.ask(&format!("{{\"fork\":{}}}", config.fork))?;
        if text(&answer, "role").as_deref() == Some("child") {
            // Waits to be killed.
            let never = port.hear()?;
            return Err(format!("a child that was to be killed read {never}"));
        }
        let ticket = text(&answer, "ticket").ok_or_else(|| format!("no ticket in {answer}"))?;
        println!("VMOVE-GUEST PORT kill: {}", port.ask(&format!("{{\"kill\":\"{ticket}\"}}"))?);
        println!("VMOVE-GUEST PORT join: {}", port.ask(&format!("{{\"join\":\"{ticket}\"}}"))?);
        for round in 0..ROUNDS {
            if !share(&mut port, config, round)? {
                return Ok(());
            }
        }
        println!("VMOVE-GUEST JOB done");
    }
    Ok(())
}

/// One round; false in a child, which is done.
fn share(port: &mut Port, config: &Config, round: u64) -> Result<bool, String> {
    let answer = port.ask(&format!("{{\"fork\": {}}}", config.fork))?;
    println!("VMOVE-GUEST PORT fork: {answer}");
    let field = |name: &str| number(&answer, name).ok_or_else(|| format!("no {name} in {answer}"));
    let (index, size) = (field("index")?, field("size")?);
    let ticket = text(&answer, "ticket").ok_or_else(|| format!("no ticket in {answer}"))?;
    if index > 0 {
        let own = (index - 1) * NUMBERS / size..index * NUMBERS / size;
        let sum = if config.nest > 0 {
            let Some(sum) = share_on(port, config.nest, own, round)? else { return Ok(false) };
            sum
        } else {
            sum(own, round)
        };
        std::thread::sleep(Duration::from_secs(config.hold_s.into()));
        println!("VMOVE-GUEST JOB slice {index} of {size}: {sum}");
        port.say(&format!("{{\"exit\":\"{ticket}\",\"result\":\"{sum}\"}}"))?;
        return Ok(false);
    }
    let joined = port.ask(&format!("{{\"join\":\"{ticket}\"}}"))?;
    println!("VMOVE-GUEST PORT join: {joined}");
    let results = results(&joined);
    let (found, expected) = (results.iter().fold(0_u64, |a, b| a.wrapping_add(*b)), sum(0..NUMBERS, round));
    if results.len() as u64 != size || found != expected {
        return Err(format!("{size} children gave {results:?}, which is {found} and not {expected}"));
    }
    println!("VMOVE-GUEST JOB round {round}: {size} children, {found}");
    Ok(true)
}

/// A child has children of its own do its part: their sum; nothing in one of these, which is done. The deepest are refused children.
fn share_on(port: &mut Port, children: u32, part: Range<u64>, round: u64) -> Result<Option<u64>, String> {
    let answer = port.ask(&format!("{{\"fork\": {children}}}"))?;
    println!("VMOVE-GUEST PORT nested: {answer}");
    let field = |name: &str| number(&answer, name).ok_or_else(|| format!("no {name} in {answer}"));
    let (index, size) = (field("index")?, field("size")?);
    let ticket = text(&answer, "ticket").ok_or_else(|| format!("no ticket in {answer}"))?;
    if index > 0 {
        let refused = port.ask("{\"fork\":1}")?;
        if !refused.contains("forbidden") {
            return Err(format!("a child that is too deep read {refused}"));
        }
        let step = |at: u64| part.start + (part.end - part.start) * at / size;
        let sum = sum(step(index - 1)..step(index), round);
        port.say(&format!("{{\"exit\":\"{ticket}\",\"result\":\"{sum}\"}}"))?;
        return Ok(None);
    }
    let joined = port.ask(&format!("{{\"join\":\"{ticket}\"}}"))?;
    let results = results(&joined);
    if results.len() as u64 != size {
        return Err(format!("{size} children of a child gave {joined}"));
    }
    Ok(Some(results.iter().fold(0, |a, b| a.wrapping_add(*b))))
}

fn results(joined: &str) -> Vec<u64> {
    let results = joined.split("\"result\":\"").skip(1);
    results.filter_map(|part| part.split('"').next()?.parse().ok()).collect()
}

fn sum(numbers: Range<u64>, round: u64) -> u64 {
    numbers.fold(0, |sum, number| sum.wrapping_add(mix(number ^ (round << 40))))
}

/// What must be answered by an error, each in its own line.
fn misbehave(port: &mut Port) -> Result<(), String> {
    let long = "x".repeat(200_000);
    for (what, line) in [
        ("garbage", "fork me"),
        ("unknown", "{\"fork\":1,\"to\":\"elsewhere\"}"),
        ("zero", "{\"fork\":0}"),
        ("many", "{\"fork\":1000000}"),
        ("ticket", "{\"join\":\"0123\"}"),
        ("exit", "{\"exit\":\"0123\",\"result\":1}"),
        ("long", &long),
    ] {
        println!("VMOVE-GUEST PORT {what}: {}", port.ask(line)?);
    }
    let mut fast = 0;
    for _ in 0..40 {
        port.say("{}")?;
    }
    for _ in 0..40 {
        fast += u32::from(port.hear()?.contains("too many"));
    }
    println!("VMOVE-GUEST PORT flood: {fast} of 40 came too fast");
    Ok(())
}

/// A field of an answer; this is no parser of JSON, and needs none.
fn after<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    answer.split(&format!("\"{name}\":")).nth(1)
}

fn number(answer: &str, name: &str) -> Option<u64> {
    after(answer, name)?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn text(answer: &str, name: &str) -> Option<String> {
    after(answer, name)?.strip_prefix('"')?.split('"').next().map(str::to_owned)
}
