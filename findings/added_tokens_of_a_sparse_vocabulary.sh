#!/usr/bin/env bash
# tokenizers 0.23.3: where the vocabulary has unused ids, added tokens of a file get other ids than the file says.
#
# Guess: each entry of `added_tokens` has its id in the file, and the tokenizer gives that id; or the file is refused.
# Seen: added tokens are counted on from the number of tokens, whatever the file says: with ids 0, 1, 2 and 5 in the
# vocabulary, tokens 6 and 7 of the file become 4 and 5. 5 is a word of the vocabulary as well, and decodes as the added
# token. Python shows no warning, and `to_str` writes the new ids. Without unused ids the file's ids hold.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile tokenizers==0.23.3
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import json

from tokenizers import Tokenizer, models, pre_tokenizers


def read(vocabulary, added):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = json.loads(tokenizer.to_str())
    settings = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for token, at in added.items():
        file["added_tokens"].append({"id": at, "content": token, **settings})
    return Tokenizer.from_str(json.dumps(file))


dense = read({"a": 0, "b": 1, "c": 2, "d": 3}, {"<4>": 4, "<5>": 5})
sparse = read({"a": 0, "b": 1, "c": 2, "d": 5}, {"<6>": 6, "<7>": 7})
of_dense, of_sparse = dense.encode("c d <4> <5>").ids, sparse.encode("c d <6> <7>").ids
back = sparse.decode(of_sparse, skip_special_tokens=False)
print("without unused ids: c d <4> <5> is", of_dense)
print("with unused ids: c d <6> <7> is", of_sparse, "and back:", back)
assert of_dense == [2, 3, 4, 5], "the behaviour changed"
assert of_sparse == [2, 5, 4, 5] and back == "c <7> <6> <7>", "the behaviour changed"
assert [token["id"] for token in json.loads(sparse.to_str())["added_tokens"]] == [4, 5], "the behaviour changed"
PROGRAM
