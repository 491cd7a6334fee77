# Prints a source file with one mutant applied: awk -v list=LIST -v number=N -v path=PATH -f apply.awk FILE
# Lines are compared without the blanks before them. Fails, with a line, where what is to go does not stand there exactly once.

function trimmed(text) {
    sub(/^[ \t]+/, "", text)
    return text
}

function fail(text) {
    print "mutant " number ": " path ": " text > "/dev/stderr"
    failed = 1
    exit 1
}

BEGIN {
    while ((getline entry < list) > 0) {
        if (entry ~ /^= /) {
            split(entry, word, " ")
            mine = word[2] == number
            here = 0
        } else if (mine && entry ~ /^@ /) {
            here = substr(entry, 3) == path
            last = ""
        } else if (mine && here && entry ~ /^- /) {
            if (last != "-")
                hunks++
            old[hunks, ++olds[hunks]] = trimmed(substr(entry, 3))
            last = "-"
        } else if (mine && here && entry ~ /^[+] /) {
            if (last == "")
                fail("a change begins with a line that goes")
            new[hunks, ++news[hunks]] = substr(entry, 3)
            last = "+"
        }
    }
    if (!hunks)
        fail("nothing is changed")
}

{ line[NR] = $0 }

END {
    if (failed)
        exit 1
    for (h = 1; h <= hunks; h++) {
        places = 0
        for (first = 1; first + olds[h] - 1 <= NR; first++) {
            for (i = 1; i <= olds[h] && trimmed(line[first + i - 1]) == old[h, i]; i++)
                ;
            if (i > olds[h]) {
                places++
                place = first
            }
        }
        if (places != 1)
            fail("stands there " places " times, not once: " old[h, 1])
        change[place] = h
    }
    for (n = 1; n <= NR; n++) {
        if (!(n in change)) {
            print line[n]
            continue
        }
        h = change[n]
        for (i = 1; i <= news[h]; i++)
            print new[h, i]
        n += olds[h] - 1
    }
}
