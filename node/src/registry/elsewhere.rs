//! What other nodes will not take of a command line: said when the VM starts, not only when it is to be moved.

use std::ffi::OsString;

use vmove_qmp::CommandLine;

use crate::blocking::{TaskFailed, run_blocking};

/// A sentence for each part of a VM's command line that another node refuses as it is normally configured. Looks at files and sockets, so
/// it must be asked before the VM runs.
pub(super) async fn not_taken(words: &[String], vm: &str) -> Result<Vec<String>, TaskFailed> {
    let (words, vm) = (words.to_vec(), vm.to_owned());
    run_blocking(move || notes(&words, &vm)).await
}

fn notes(words: &[String], vm: &str) -> Vec<String> {
    let words = words.iter().map(|word| OsString::from(word.replace("{name}", vm))).collect();
    // What cannot be read is refused by others.
    let Ok(line) = CommandLine::parse(words) else { return Vec::new() };
    let forbidden = line.forbidden(&[]).unwrap_or_default();
    let mut notes: Vec<String> = forbidden
        .iter()
        .map(|one| {
            format!(
                "other nodes will not take {one}: change it, or name the rule among options in [peers] there"
            )
        })
        .collect();
    for path in line.listening_paths().unwrap_or_default() {
        let path = path.display().to_string();
        if !forbidden.iter().any(|one| one.option.contains(&path)) {
            notes.push(format!(
                "a node on the same host will not take this, since both QEMUs would use {path}: write {{vmdir}}/ and a name instead"
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Vec<String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        notes(&words, "web")
    }

    #[test]
    fn what_check_would_refuse_later_is_noted() {
        for option in [
            "-serial file:/tmp/x",
            "-serial file:/var/lib/x/{name}",
            "-chardev socket,id=c,server=on,path=/nowhere/abs",
            "-monitor unix:/nowhere/abs,server=on,wait=off",
            "-debugcon file:/nowhere/abs",
            "-D /nowhere/abs",
        ] {
            let found = of(&format!("qemu {option}"));
            assert_eq!(found.len(), 1, "{option}: {found:?}");
            assert!(found[0].contains("{vmdir}") && found[0].contains("will not take"), "{found:?}");
        }
        assert!(of("qemu -serial file:/var/lib/x/{name}")[0].contains("/var/lib/x/web"));
        let fine =
            "qemu -m 64M -drive file=/srv/a.img -serial file:{vmdir}/s.log -D {vmdir}/q.log -serial none";
        assert_eq!(of(fine), Vec::<String>::new());
    }
}
