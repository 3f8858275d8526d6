//! LDIF, as GFD.218 has it, for the schema `GLUE20.schema` of information systems.

use std::fmt::Write as _;

use super::entity::Entity;

pub(super) fn render(entities: &[Entity]) -> String {
    entities.iter().map(entry).collect::<Vec<_>>().join("\n")
}

fn entry(entity: &Entity) -> String {
    let (kind, base) = (entity.kind.name(), entity.kind.base());
    let mut text = String::new();
    let mut line = |key: &str, value: &str| {
        // What is not ASCII would have to be encoded.
        let plain: String = value.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).collect();
        let plain = plain.trim().trim_start_matches([':', '<']);
        if !plain.is_empty() {
            let _ = writeln!(text, "{key}: {plain}");
        }
    };
    line("dn", &format!("GLUE2{base}ID={},o=glue", entity.id));
    line("objectClass", &format!("GLUE2{base}"));
    line("objectClass", &format!("GLUE2{kind}"));
    line(&format!("GLUE2{base}ID"), &entity.id);
    line("GLUE2EntityName", &entity.name);
    entity.other.iter().for_each(|text| line("GLUE2EntityOtherInfo", text));
    for (_, value) in &entity.extensions {
        line("GLUE2EntityOtherInfo", &format!("accelerator={value}"));
    }
    for (of, name, value) in &entity.values {
        value.texts().iter().for_each(|text| line(&format!("GLUE2{of}{name}"), text));
    }
    for (of, to, id) in &entity.links {
        line(&format!("GLUE2{of}{to}ForeignKey"), id);
    }
    text
}
