//! The one spelling of paths, queries and header values that signer and checker agree on before they hash.
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use crate::dialect::s3::percent_decode;

/// A value without space round it, and with one space for each run inside.
pub(super) fn fold_spaces(text: &mut Vec<u8>, value: &[u8]) {
    let mut words = value.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    text.extend_from_slice(words.next().unwrap_or_default());
    for word in words {
        text.push(b' ');
        text.extend_from_slice(word);
    }
}

/// Pairs sorted by their encoded form; a name without `=` gets one.
pub(super) fn canonical_query(text: &mut Vec<u8>, query: &[u8]) {
    let mut pairs: SmallVec<[(Vec<u8>, Vec<u8>); 8]> = query
        .split(|&byte| byte == b'&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let equals = pair.iter().position(|&byte| byte == b'=').unwrap_or(pair.len());
            (encode_anew(&pair[..equals]), encode_anew(pair.get(equals + 1..).unwrap_or_default()))
        })
        .collect();
    pairs.sort_unstable();
    for (at, (name, value)) in pairs.iter().enumerate() {
        if at > 0 {
            text.push(b'&');
        }
        text.extend_from_slice(name);
        text.push(b'=');
        text.extend_from_slice(value);
    }
}

/// In a query, unlike in a path, `+` is a space; signers write it as `%20`.
fn encode_anew(part: &[u8]) -> Vec<u8> {
    let spaced: Vec<u8> = part.iter().map(|&byte| if byte == b'+' { b' ' } else { byte }).collect();
    let mut encoded = Vec::with_capacity(part.len());
    uri_encode(&mut encoded, percent_decode(&spaced).as_deref().unwrap_or(&spaced), false);
    encoded
}

/// Percent-encodes all but letters, digits, `-._~` and, in a path, `/`.
pub(super) fn uri_encode(encoded: &mut Vec<u8>, bytes: &[u8], keep_slash: bool) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for &byte in bytes {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte),
            b'/' if keep_slash => encoded.push(byte),
            _ => encoded.extend_from_slice(&[
                b'%',
                DIGITS[usize::from(byte >> 4)],
                DIGITS[usize::from(byte & 15)],
            ]),
        }
    }
}
