#!/bin/sh
# Only the kernel sets (and the loops that measure the CPU for them) may hold instructions beyond x86-64-v2: a program must start on any
# x86-64-v2 machine and choose there.
#
#   object-code.sh BUILD    looks at every object of the programs in a build folder
set -eu
build=$1
tab=$(printf '\t')
# All vector instructions of AVX and later begin with v; the rest are mask registers, tiles, and the integer instructions of v3.
# tzcnt is left out: where it is unknown it is bsf, and compilers use it as such.
wide="v[a-z]+[0-9a-z]*|k(mov|or|and|andn|xor|xnor|not|test|ortest|shiftl|shiftr|add|unpck)[bwdq]+|tile[a-z0-9]+|tdp[a-z0-9]+|ldtilecfg|sttilecfg"
wide="$wide|andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|movbe"
objects=0 wide_objects=0 broken=0

# found OBJECT: the first wide instruction, with its function.
found() {
    objdump -d --no-show-raw-insn "$1" |
        grep -E "^[0-9a-f]+ <|^ *[0-9a-f]+:$tab([{]vex[}] |rep |lock )*($wide)[[:space:]]" | grep -Ev "verr|verw|vm[a-z]+call" |
        awk '/^[0-9a-f]+ </ { name = $2; next } { print name, $0; exit }'
}

for folder in proto shm io_daemon compute cmd; do
    [ -d "$build/$folder" ] || { echo "$build has no folder $folder"; exit 1; }
    list=$(find "$build/$folder" -name '*.o')
    [ -n "$list" ] || { echo "$build/$folder holds no object"; exit 1; }
    for object in $list; do
        objects=$((objects + 1))
        instruction=$(found "$object")
        case $object in
        *kernel_scalar_v3.a.p/* | *kernel_avx*.a.p/* | *kernel_amx.a.p/* | *kernel_amx_model_avx512.a.p/* | \
            *peak_avx*.a.p/* | *peak_amx.a.p/*)
            wide_objects=$((wide_objects + 1))
            # They show that this test can see what it looks for.
            [ -n "$instruction" ] || { echo "$object: no wide instruction was found where there must be some"; broken=1; }
            ;;
        *)
            [ -z "$instruction" ] || { echo "$object: $instruction"; broken=1; }
            ;;
        esac
    done
done
echo "$objects objects, $wide_objects of them of kernel sets for wider machines"
[ $wide_objects -gt 0 ] || { echo "no object of a wider kernel set was seen"; exit 1; }
exit $broken
