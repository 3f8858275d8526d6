//! `args` of a VM: what Proxmox VE puts at the end of QEMU's command line as it is.

use std::ops::Range;
use std::path::Path;

use vmove_types::proxmox::MONITORS;

use crate::{MEMORY, PveError, Vmid};

/// Name of the memory in QEMU. Both sides of a migration must have the same.
const MEMORY_ID: &str = "vmove-ram";

/// What vmove adds: the machine's memory in a named file, and a monitor. `mib`: of memory.
pub fn ours(vmid: Vmid, mib: u64) -> String {
    // With the size in its name, a file that an earlier start left is never of another size, which QEMU would refuse.
    format!(
        "-object memory-backend-file,id={MEMORY_ID},size={mib}M,mem-path={MEMORY}/{vmid}-{mib}M,share=on,align=2M \
         -machine memory-backend={MEMORY_ID} -qmp unix:{},server=on,wait=off",
        vmid.monitor().display()
    )
}

/// Whether this option, with this value, is one of those.
fn is_ours(option: &str, value: &str) -> bool {
    match option {
        "-object" => value.starts_with(&format!("memory-backend-file,id={MEMORY_ID},")),
        "-machine" => value == format!("memory-backend={MEMORY_ID}"),
        "-qmp" => value.starts_with(&format!("unix:{MONITORS}/")),
        _ => false,
    }
}

/// The arguments without ours.
pub fn without_ours(args: &str) -> Result<String, PveError> {
    let found = split(args)?;
    let mut out = args.to_owned();
    for pair in found.windows(2).rev().filter(|pair| is_ours(&pair[0].1, &pair[1].1)) {
        let blanks = args[..pair[0].0.start].len() - args[..pair[0].0.start].trim_end().len();
        out.replace_range(pair[0].0.start - blanks..pair[1].0.end, "");
    }
    Ok(out.trim().to_owned())
}

/// Whether all of ours are there, for this VM with this much memory.
pub fn has_ours(args: &str, vmid: Vmid, mib: u64) -> Result<bool, PveError> {
    let found: Vec<String> = words(args)?;
    let wanted = words(&ours(vmid, mib))?;
    Ok(found.windows(wanted.len()).any(|words| words == wanted))
}

/// Another VM than this one whose monitor or memory the arguments name: `qm clone` and `qmrestore` copy them as they are.
pub fn of_another(args: &str, vmid: Vmid) -> Result<Option<Vmid>, PveError> {
    let found = split(args)?;
    let ours = found.windows(2).filter(|pair| is_ours(&pair[0].1, &pair[1].1));
    let named = ours.flat_map(|pair| pair[1].1.split(',')).filter_map(|part| {
        let path = part.strip_prefix("mem-path=").or_else(|| part.strip_prefix("unix:"))?;
        let name = Path::new(path).file_name()?.to_str()?;
        name.split(['-', '.']).next()?.parse::<Vmid>().ok()
    });
    Ok(named.into_iter().find(|named| *named != vmid))
}

/// The words of `args`, as a shell would split them.
///
/// # Errors
/// [`PveError::Quote`].
pub fn words(args: &str) -> Result<Vec<String>, PveError> {
    Ok(split(args)?.into_iter().map(|(_, word)| word).collect())
}

fn split(args: &str) -> Result<Vec<(Range<usize>, String)>, PveError> {
    let mut found = Vec::new();
    let mut word: Option<(usize, String)> = None;
    let mut quote = None;
    let mut letters = args.char_indices();
    while let Some((at, letter)) = letters.next() {
        if quote.is_none() && letter.is_whitespace() {
            found.extend(word.take().map(|(start, word)| (start..at, word)));
            continue;
        }
        let (_, word) = word.get_or_insert_with(|| (at, String::new()));
        match (letter, quote) {
            ('\\', None | Some('"')) => word.extend(letters.next().map(|(_, next)| next)),
            ('"' | '\'', None) => quote = Some(letter),
            (_, Some(open)) if letter == open => quote = None,
            _ => word.push(letter),
        }
    }
    if quote.is_some() {
        return Err(PveError::Quote(args.to_owned()));
    }
    found.extend(word.map(|(start, word)| (start..args.len(), word)));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vmid() -> Vmid {
        "100".parse().unwrap()
    }

    #[test]
    fn words_are_split_as_by_a_shell() {
        let found = words(r#"  -cpu 'host,+x y' -fw_cfg "name=a b",file=/x\ y "\"" "#).unwrap();
        assert_eq!(found, ["-cpu", "host,+x y", "-fw_cfg", "name=a b,file=/x y", "\""]);
        assert!(matches!(words("-x 'y"), Err(PveError::Quote(_))));
    }

    #[test]
    fn arguments_that_were_copied_name_the_vm_that_they_are_of() {
        let args = format!("-cpu host {}", ours(vmid(), 768));
        assert_eq!(of_another(&args, vmid()).unwrap(), None);
        let clone = "101".parse().unwrap();
        assert_eq!(of_another(&args, clone).unwrap(), Some(vmid()));
        let half = args.replace("100-768M", "101-768M");
        assert_eq!(of_another(&half, clone).unwrap(), Some(vmid()), "the monitor alone");
        assert_eq!(of_another("-qmp unix:/run/other/100.qmp", clone).unwrap(), None, "not one of vmove's");
    }

    #[test]
    fn ours_are_taken_out_and_others_stay() {
        let ours = ours(vmid(), 768);
        for before in ["", "-cpu 'host,+x y'", "-object memory-backend-ram,id=other,size=1M -qmp unix:/x"] {
            let with = format!("{before} {ours}").trim().to_owned();
            assert!(has_ours(&with, vmid(), 768).unwrap());
            assert!(!has_ours(&with, vmid(), 1024).unwrap(), "of another size");
            assert_eq!(without_ours(&with).unwrap(), before);
            assert_eq!(
                without_ours(&format!("{with} -no-hpet")).unwrap(),
                format!("{before} -no-hpet").trim()
            );
        }
    }
}
