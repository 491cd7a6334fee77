# convert-model.sh CALYPTE SOURCE STAMP: converts SOURCE into the folder beside STAMP that is called like it without `.stamp`.
set -eu
rm -rf "${3%.stamp}"
"$1" convert "$2" "${3%.stamp}"
touch "$3"
